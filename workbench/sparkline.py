"""A small line as inline SVG, for results that show themselves in a notebook: no library, no script, few bytes."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

WIDTH, HEIGHT, PAD = 480, 64, 2
MAX_POINTS = 120
COLOR, SHADE = "#0072B2", "#009E73"


def sparkline(values: Sequence[float], title: str, shaded: tuple[float, float] | None = None) -> str:
    """The values from left to right above a floor of 0, with the highest one named.

    Args:
        values: at least two, at equal distances; more than 120 are averaged to as many.
        title: what they are; also read out where the image is not seen.
        shaded: a part to shade, as shares of the width.

    Returns:
        An `<svg>` element; empty where there is no line to draw.
    """
    points = _thinned(values)
    top = max(points, default=0.0)
    if len(points) < 2 or top <= 0.0:
        return ""
    step = (WIDTH - 2 * PAD) / (len(points) - 1)
    height = HEIGHT - 2 * PAD
    places = [(PAD + step * at, PAD + height * (1 - value / top)) for at, value in enumerate(points)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = html.escape(f"{title}, at most {top:.4g}")
    left, right = shaded or (0.0, 0.0)
    rect = (
        f"<rect x='{left * WIDTH:.1f}' y='0' width='{(right - left) * WIDTH:.1f}' height='{HEIGHT}' fill='{SHADE}' "
        "fill-opacity='0.12'/>"
    )
    return (
        f"<figure style='margin:0'><svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' role='img' "
        f"aria-label='{name}' style='max-width:100%'>{rect if shaded else ''}"
        f"<polyline points='{line}' fill='none' stroke='{COLOR}' stroke-width='1.5'/></svg>"
        f"<figcaption style='color:#595959'>{name}</figcaption></figure>"
    )


def _thinned(values: Sequence[float]) -> list[float]:
    if len(values) <= MAX_POINTS:
        return list(values)
    edges = [len(values) * at // MAX_POINTS for at in range(MAX_POINTS + 1)]
    return [sum(values[first:end]) / (end - first) for first, end in itertools.pairwise(edges)]
