"""One line that says how far long work is, and leaves nothing that changes from run to run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self


class Line:
    """One line of progress, `title` and what it came to.

    In a terminal: a line that is gone at the end. In a notebook: a display whose text is replaced.
    nbval compares the text a display had first, the stored notebook holds the one it had last; so
    both are the same, `title`.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._status: Any = None
        self._handle: Any = None
        self._began = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> Self:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is not None and shell.has_trait("kernel"):
            from IPython.display import display

            self._handle = display({"text/plain": self._title}, raw=True, display_id=True)
        else:
            from rich.console import Console

            console = Console(stderr=True)
            if console.is_terminal:
                self._status = console.status(self._title)
                self._status.start()
        return self

    def tick(self, state: Callable[[float], str]) -> None:
        """Show what `state` says of the seconds since the start; at most once a second."""
        seconds = time.monotonic() - self._began
        if seconds - self._shown < 1:
            return
        self._shown = seconds
        text = f"{self._title}: {state(seconds)}"
        if self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)
        elif self._status is not None:
            self._status.update(text)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        elif self._handle is not None:
            text = self._title if kind is None else f"{self._title}: not done"
            self._handle.update({"text/plain": text}, raw=True)
