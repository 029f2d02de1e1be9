"""``python -m aiocuda_copy``."""

import sys

from .cli import main

sys.exit(main())
