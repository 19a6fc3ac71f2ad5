"""`python -m torchbelay.cli`."""

import sys

from . import main

sys.exit(main())
