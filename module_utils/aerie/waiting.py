# SPDX-License-Identifier: Apache-2.0
"""Lines for whoever waits at the control node: one when something new begins, and others while it lasts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

# Ten seconds without a line are the most; a busy machine is late.
_EVERY_S = 9.0


class Lines:
    """Shows what is new at once, and what lasts every few seconds.

    ``show`` prints a line. A call that is waited for may take longer than that: meanwhile a thread shows the last line.
    """

    def __init__(self, host: str, show: Callable[[str], object], every_s: float = _EVERY_S) -> None:
        self._host = host
        self._show = show
        self._every_s = every_s
        self._lock = threading.Lock()
        self._key = ""
        self._text = "no answer yet"
        self._elapsed_s: float | None = 0.0
        self._at = self._shown = time.monotonic()

    def say(self, key: str, text: str, elapsed_s: float | None = None) -> None:
        """Take what is known by now. ``key`` is another one if something new began, ``elapsed_s`` ago."""
        with self._lock:
            new = key != self._key
            self._key, self._text, self._elapsed_s = key, text, elapsed_s
            self._at = time.monotonic()
            self._show_if(new)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Show a line whenever one is due, until the block ends."""
        over = threading.Event()
        thread = threading.Thread(target=self._keep, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _keep(self, over: threading.Event) -> None:
        while not over.wait(max(self._shown + self._every_s - time.monotonic(), 0.0)):
            with self._lock:
                self._show_if(False)

    def _show_if(self, new: bool) -> None:
        now = time.monotonic()
        if new or now - self._shown >= self._every_s:
            self._shown = now
            age = "" if self._elapsed_s is None else f" ({self._elapsed_s + now - self._at:.0f} s)"
            self._show(f"{self._host}: {self._text}{age}")
