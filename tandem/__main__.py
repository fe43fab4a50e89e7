"""`python -m tandem`: the command `tandem`."""

import sys

from tandem.command import main

if __name__ == "__main__":
    sys.exit(main())
