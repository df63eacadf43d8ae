"""`python -m ascend_pd` is `ascend-pd`."""

from __future__ import annotations

import sys

from ascend_pd.cli import main

if __name__ == "__main__":
    sys.exit(main())
