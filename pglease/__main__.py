"""`python -m pglease` is `pglease`."""

import sys

from pglease.cli import main

if __name__ == "__main__":
    sys.exit(main())
