"""Steps of a scheduled run that a command line can name."""

from __future__ import annotations

from enum import StrEnum


class CostTableStep(StrEnum):
    """What becomes of the cost table after a run that was not worse."""

    NONE = "none"
    BUILD = "build"
    PUBLISH = "publish"
