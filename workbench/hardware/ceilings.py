"""The child of the probe: measures what memory and arithmetic of one device can give, with torch.

    python -m workbench.hardware.ceilings < request.json > measured.json

Copy bandwidth counts the bytes read and the bytes written. The matrix rate counts 2n³ operations of a product of two
square matrices. Each repetition runs long enough for the clock; the first ones warm up and are thrown away.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

MAX_REPEATS = 40
REPETITION_S = {"cpu": 0.1, "cuda": 0.03}
MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}
MISSING_TORCH = 4


def main() -> int:
    """Reads the request, prints the measurement."""
    request = json.load(sys.stdin)
    try:
        import torch
    except ModuleNotFoundError:
        sys.stderr.write("torch is not installed: pip install 'llm-workbench[cpu]', or [gpu] on a machine with a GPU")
        return MISSING_TORCH
    device = request["device"]
    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write(f"torch {torch.__version__} finds no usable GPU")
        return MISSING_TORCH
    if device == "cpu":
        torch.set_num_threads(request["num_threads"])
    json.dump(_measured(torch, request), sys.stdout)
    return 0


def _measured(torch: Any, request: dict[str, Any]) -> dict[str, Any]:
    device, budget_s = request["device"], request["budget_s"] / 2

    def finished() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    copies = _copies(torch, request, finished, budget_s)
    size, dtype = MATRIX_SIZES[device], getattr(torch, request["dtype"])
    left = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
    right = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
    product = torch.empty(size, size, dtype=dtype, device=device)
    products = _rates(lambda: torch.mm(left, right, out=product), 2 * size**3, finished, REPETITION_S[device], budget_s)
    return {
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads() if device == "cpu" else None,
        "matrix_size": size,
        "copy_bytes_per_s": copies,
        "operations_per_s": products,
    }


def _copies(torch: Any, request: dict[str, Any], finished: Callable[[], None], budget_s: float) -> list[float]:
    device = request["device"]
    source = torch.ones(request["copy_bytes"] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved_bytes = 2 * source.numel() * source.element_size()
    return _rates(lambda: target.copy_(source), moved_bytes, finished, REPETITION_S[device], budget_s)


def _rates(
    act: Callable[[], object], work: float, finished: Callable[[], None], repetition_s: float, budget_s: float
) -> list[float]:
    """Work a second of each repetition, until the budget is spent."""
    began_s = time.perf_counter()
    act()
    finished()
    warm_s = time.perf_counter()
    act()
    finished()
    num_acts = max(1, round(repetition_s / max(time.perf_counter() - warm_s, 1e-6)))
    rates: list[float] = []
    while len(rates) < MAX_REPEATS and (not rates or time.perf_counter() - began_s < budget_s):
        start_s = time.perf_counter()
        for _ in range(num_acts):
            act()
        finished()
        rates.append(work * num_acts / (time.perf_counter() - start_s))
    return rates


if __name__ == "__main__":
    sys.exit(main())
