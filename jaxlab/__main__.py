"""``python -m jaxlab`` is the ``jaxlab`` command."""

import sys

from jaxlab.cli import main

sys.exit(main())
