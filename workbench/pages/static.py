"""A report's page with its figures as SVG images: a tenth of the size, and no script in it.

A page of `workbench report run` carries the plotting library, 4 MB, so that figures can be hovered and zoomed. For a
page that is kept in a repository a browser draws each figure once and the library goes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDTH_PX = 900
TIMEOUT_S = 90
DONE = "workbench-static"

# Runs in the page: each figure becomes an image of itself, at a width that is the same everywhere.
_DRAW = """<script>
window.addEventListener("load", async () => {
  for (const figure of [...document.querySelectorAll(".js-plotly-plot")]) {
    const height = figure.layout.height || 460;
    const image = document.createElement("img");
    image.src = await Plotly.toImage(figure, {format: "svg", width: %d, height: height});
    image.alt = (figure.layout.title && figure.layout.title.text) || "figure";
    image.style.maxWidth = "100%%";
    figure.replaceWith(image);
  }
  document.body.dataset.state = "%s";
});
</script>"""
_SCRIPT = re.compile(r"<script\b[^>]*>.*?</script>", re.DOTALL)
_LIBRARY_STYLE = re.compile(r"<style id=\"(?:plotly[^\"]*|[0-9a-f]{64})\"[^>]*>.*?</style>", re.DOTALL)


class NotDrawn(Exception):
    """The page stays as it is; the message says why and what to do."""


def find_browser() -> str:
    """A Chromium on this machine. Raises NotDrawn."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise NotDrawn(f"no browser draws the figures: install one of {', '.join(BROWSERS)} (Debian: chromium)")


def make_static(page: Path, browser: str | None = None) -> None:
    """Replaces the page by one with images and without scripts.

    Args:
        page: a report's HTML.
        browser: the program; one that is found when None.

    Raises:
        NotDrawn: no browser, or it did not draw in time.
        OSError: the page cannot be read or written.
    """
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="workbench-page-") as scratch:
        source = Path(scratch) / "page.html"
        draw = _DRAW % (WIDTH_PX, DONE)
        before, _, after = text.rpartition("</body>")
        source.write_text(f"{before}{draw}</body>{after}", encoding="utf-8")
        drawn = _dumped(browser or find_browser(), source, Path(scratch))
    if f'data-state="{DONE}"' not in drawn:
        raise NotDrawn(f"{page}: the browser did not draw its figures in {TIMEOUT_S} s")
    static = _LIBRARY_STYLE.sub("", _SCRIPT.sub("", drawn)).replace(f' data-state="{DONE}"', "")
    partial = page.with_name(page.name + ".partial")
    partial.write_text(static, encoding="utf-8")
    partial.replace(page)


def _dumped(browser: str, source: Path, scratch: Path) -> str:
    command = [
        browser, *FLAGS, f"--user-data-dir={scratch / 'profile'}", f"--virtual-time-budget={TIMEOUT_S * 1000 // 3}",
        "--dump-dom", source.as_uri(),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotDrawn(f"{browser}: {error}") from None
    return done.stdout
