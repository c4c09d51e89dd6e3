"""``python -m streamrl``."""

import sys

from streamrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
