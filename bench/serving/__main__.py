"""`python -m bench.serving`: see `bench.serving.run`."""

import sys

from bench.serving.run import main

if __name__ == "__main__":
    sys.exit(main())
