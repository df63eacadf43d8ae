"""Runs a coroutine by hand: to its first wait at once, from then on from callbacks, without a task of its own.

An ASGI server's `send` only waits when the client's socket is full, and its `receive` waits for one event. A task
for each costs more than the work itself, per token or per request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Stepped:
    """Not for coroutines that need to know their task (timeouts, cancellation scopes).

    Args:
        coroutine: may wait on asyncio futures and on `sleep(0)`; what it raises is kept in `error`.
        on_done: called once it has ended, unless it ends before the constructor returns.
    """

    __slots__ = ("_coroutine", "_on_done", "done", "error", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_done: Callable[[Stepped], None]) -> None:
        self._coroutine = coroutine
        self._on_done: Callable[[Stepped], None] | None = None
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        self._step(None)
        self._on_done = on_done

    def _step(self, _: object) -> None:
        if self.done:
            return
        try:
            waited_for = self._coroutine.send(None)
        except StopIteration as stop:
            self.result = stop.value
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for it
            self.error = error
        else:
            self._wait(waited_for)
            return
        self.done = True
        if self._on_done is not None:
            self._on_done(self)

    def _wait(self, waited_for: Any) -> None:
        if waited_for is None:
            asyncio.get_running_loop().call_soon(self._step, None)
            return
        waited_for._asyncio_future_blocking = False
        waited_for.add_done_callback(self._step)

    def close(self) -> None:
        """Give up waiting."""
        if not self.done:
            self.done = True
            self._coroutine.close()
