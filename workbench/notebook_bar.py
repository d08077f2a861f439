"""A bar that fills while something runs, in a notebook: plain HTML that is drawn again, no widget and no extension.

It stays in the executed notebook as it stood at the end, which widgets do not.
"""

from __future__ import annotations

import html
import sys
import time

EVERY_S = 1.0


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookBar:
    """Takes (done, total); draws at most once a second, and the end."""

    def __init__(self, title: str) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._title = html.escape(title)
        self._drawn_s = time.monotonic()
        self._shown = display(HTML(self._text(0, 0)), display_id=True)

    def __call__(self, done: int, total: int) -> None:
        """Draws how far it is."""
        now_s = time.monotonic()
        if self._shown is not None and (done >= total or now_s - self._drawn_s >= EVERY_S):
            self._drawn_s = now_s
            self._shown.update(self._html(self._text(done, total)))

    def _text(self, done: int, total: int) -> str:
        share = f"value='{done}' max='{total}'" if total else ""
        return f"<progress {share} style='width:20em'></progress> {self._title}: {done} of {total or '…'} requests"
