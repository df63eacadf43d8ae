"""Calls that D makes back to this proxy while its own request waits (vllm-ascend's layer-wise dialect)."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any


class Callback:
    """One expected call: `message` ends with what D said, `outcome` with whether P did its part."""

    __slots__ = ("message", "outcome", "token")

    def __init__(self, token: str) -> None:
        loop = asyncio.get_running_loop()
        self.token = token
        self.message: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.outcome: asyncio.Future[bool] = loop.create_future()


class Callbacks:
    """Those expected now; each is owned by one attempt, which ends it."""

    def __init__(self) -> None:
        self._expected: dict[str, Callback] = {}

    def expect(self) -> Callback:
        """A new one, under an unguessable token."""
        callback = Callback(secrets.token_urlsafe(24))
        self._expected[callback.token] = callback
        return callback

    def end(self, callback: Callback) -> None:
        """The attempt is over; a call that still waits is told so."""
        self._expected.pop(callback.token, None)
        if not callback.outcome.done():
            callback.outcome.set_result(False)

    async def arrive(self, token: str, message: dict[str, Any]) -> bool | None:
        """D calls: None when nobody expects it; else, once P has finished, whether it did."""
        callback = self._expected.get(token)
        if callback is None:
            return None
        if not callback.message.done():
            callback.message.set_result(message)
        return await asyncio.shield(callback.outcome)
