"""Ctrl-C and SIGTERM as one orderly ``KeyboardInterrupt``.

The first signal raises where the program stands, or at the end of the section that must not be torn. A second one ends
the process at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# timeout(1) and shells may deliver one request twice, to the process and to its group.
_SAME_REQUEST_SECONDS = 0.5


class Interrupts:
    """Within ``with Interrupts():`` the two signals are handled as said above; only the main thread can do so."""

    def __init__(self) -> None:
        self._requested_at: float | None = None
        self._owed = False
        self._shields = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """A section that is finished before an interrupt is raised."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        # Also where it was raised before: the interpreter swallows exceptions in weak-reference callbacks.
        if self._owed and not self._shields:
            raise KeyboardInterrupt

    def accept(self) -> None:
        """The ``KeyboardInterrupt`` was caught and is being served: raise it no more."""
        self._owed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at, self._owed = now, True
            if not self._shields:
                raise KeyboardInterrupt
        elif now - self._requested_at > _SAME_REQUEST_SECONDS:
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # the progress bar hides the cursor
                sys.stderr.flush()
            os._exit(130)
