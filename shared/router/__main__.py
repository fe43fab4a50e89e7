"""`python -m shared.router`: the same as `tandem route`."""

import sys

from shared.router.starting import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
