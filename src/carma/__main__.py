"""`python -m carma` is the `carma` command."""

import sys

from carma.cli import main

if __name__ == "__main__":
    sys.exit(main())
