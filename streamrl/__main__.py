"""``python -m streamrl``."""

import sys

from streamrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
