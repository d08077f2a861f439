"""`python -m serving.control`: runs the control plane until it is told to stop."""

from __future__ import annotations

import sys

from serving.control.app import main

if __name__ == "__main__":
    sys.exit(main())
