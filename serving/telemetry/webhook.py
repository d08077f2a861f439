"""Posts JSON to a webhook, a few times. The address may hold a secret: it is in no message."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

TIMEOUT_S = 10.0
PAUSES_S = (0.0, 1.0, 4.0)


def post(url: str, data: Mapping[str, Any], sleep: Callable[[float], None] = time.sleep) -> str | None:
    """Posts the data; why it was not taken, or None. Blocks for half a minute at most."""
    request = urllib.request.Request(
        url, json.dumps(data).encode(), {"content-type": "application/json"}, method="POST"
    )
    trouble = ""
    for pause_s in PAUSES_S:
        sleep(pause_s)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            trouble = f"the webhook answered {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except OSError as error:
            trouble = f"the webhook does not answer ({getattr(error, 'reason', error)})"
    return trouble
