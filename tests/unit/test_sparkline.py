"""The small line of a result: within its box, named, and absent where there is nothing to draw."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from workbench.sparkline import HEIGHT, MAX_POINTS, WIDTH, sparkline


@pytest.mark.parametrize("count", [2, MAX_POINTS, 1000])
def test_the_line_stays_in_its_box_and_names_its_top(count: int) -> None:
    text = sparkline([float(value % 7) for value in range(count)], "tokens/s & more", (0.25, 0.5))
    root = ElementTree.fromstring(text)
    line = root.find(".//polyline")
    assert line is not None and "tokens/s & more, at most" in str(root.find("figcaption").text)  # type: ignore[union-attr]
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(points) == min(count, MAX_POINTS)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert re.search(r"<rect x='120.0' y='0' width='120.0'", text)


def test_nothing_to_draw_is_nothing() -> None:
    assert sparkline([], "t") == sparkline([1.0], "t") == sparkline([0.0, 0.0], "t") == ""
    assert "<rect" not in sparkline([1.0, 2.0], "t")
