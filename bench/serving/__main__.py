"""`python -m bench.serving` is `bench.serving.run`."""

import sys

from bench.serving.run import main

sys.exit(main())
