"""`python -m samovar` is `samovar`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
