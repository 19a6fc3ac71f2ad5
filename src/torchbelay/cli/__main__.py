"""`python -m torchbelay.cli`."""

import sys

from .main import main

sys.exit(main())
