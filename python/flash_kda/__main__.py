"""``python -m flash_kda``."""

import sys

from flash_kda.cli import main

sys.exit(main())
