"""`python -m meanshift` is the command `meanshift`."""

import sys

from meanshift.cli import main

if __name__ == "__main__":
    sys.exit(main())
