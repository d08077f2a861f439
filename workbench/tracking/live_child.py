"""Brings the points of a run that is being measured to MLflow, in a process of its own: run as a script.

    first line of stdin   {"url": …, "headers": {…}}
    each line after it    {"run_id": …, "metrics": […]}, sent as it is

The load client must not share its interpreter with this: a thread that is put aside while it holds it, on a busy
machine, holds up all stamps. The standard library alone, so that it starts in a tenth of a second and takes next to
nothing. The first failure ends it, with a line on standard error that says why.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

LOG_BATCH = "/api/2.0/mlflow/runs/log-batch"
TIMEOUT_S = 10.0
NICE = 10


def main() -> int:
    """Sends until standard input ends."""
    os.nice(NICE)
    where: dict[str, Any] = json.loads(sys.stdin.readline() or "{}")
    for line in sys.stdin:
        headers = {"Content-Type": "application/json", **where["headers"]}
        request = Request(where["url"] + LOG_BATCH, data=line.encode(), headers=headers)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read()
        except (URLError, OSError) as error:
            sys.stderr.write(f"{where['url']} does not take live metrics: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
