"""Passes an engine's answer on: a stream event by event, without looking into tokens; anything else whole."""

from __future__ import annotations

from collections.abc import Callable

from proxy.downstream import Downstream
from proxy.errors import LegFailed
from proxy.settings import TimeoutSettings
from proxy.sse import STREAM_END, EventCutter, has_error, read_error, split_at_error
from proxy.upstream import Answer


class EngineError(LegFailed):
    """The engine reported an error; its connector may know the reason."""


class Relay:
    """One answering leg.

    Args:
        on_first: called once, with the first event (or the head of a whole answer) in hand.
    """

    def __init__(
        self,
        answer: Answer,
        down: Downstream,
        timeouts: TimeoutSettings,
        who: str,
        on_first: Callable[[], None],
    ) -> None:
        self._answer = answer
        self._down = down
        self._timeouts = timeouts
        self._who = who
        self._on_first = on_first
        self._cutter = EventCutter()
        self._last = b""
        self._failure: LegFailed | None = None
        self.events = 0

    async def run(self, first_s: float) -> None:
        """To the end of the answer.

        Raises:
            LegFailed: before or after the answer has started; the caller knows which from its downstream.
        """
        answer = self._answer
        if answer.status == 200 and answer.streaming:
            await self._stream(first_s)
            return
        body = await answer.read(self._timeouts.inter_token_s)
        if answer.status >= 500:
            message = read_error(body)[1]
            raise EngineError(f"{self._who}: {message or f'HTTP {answer.status}'}", kind="engine_error")
        self._on_first()
        await self._down.whole(answer.status, body, answer.content_type)

    async def _stream(self, first_s: float) -> None:
        events = await self._first_events(first_s)
        self._on_first()
        await self._down.start_stream()
        self._pass_on(events)
        try:
            await self._answer.pipe(self._sink, self._timeouts.inter_token_s)
        finally:
            if self._failure is not None:
                raise self._failure
        if self._cutter.rest() or not self._last.endswith(STREAM_END):
            raise LegFailed(f"{self._who} broke off its answer", kind="connection_lost")
        await self._down.end()

    async def _first_events(self, first_s: float) -> bytes:
        while piece := await self._answer.piece(first_s):
            if events := self._cut(piece):
                if has_error(events):
                    _, status, message = split_at_error(events)
                    raise self._error(status, message)
                return events
        raise LegFailed(f"{self._who} ended its answer before its first event", kind="connection_lost")

    def _sink(self, piece: bytes) -> None:
        if self._failure is not None:
            return
        events = self._cut(piece)
        if not events:
            return
        if has_error(events):
            good, status, message = split_at_error(events)
            self._failure = self._error(status, message)
            if good:
                self._pass_on(good)
            self._answer.close()
            return
        self._pass_on(events)

    def _cut(self, piece: bytes) -> bytes:
        try:
            return self._cutter.feed(piece)
        except ValueError as error:
            self._failure = LegFailed(f"{self._who}: {error}", kind="bad_stream")
            self._answer.close()
            return b""

    def _pass_on(self, events: bytes) -> None:
        self._last = events
        self.events += 1
        if not self._down.write_now(events, self._writable):
            self._answer.pause()

    def _writable(self) -> None:
        self._answer.resume(self._timeouts.inter_token_s)

    def _error(self, status: int, message: str) -> LegFailed:
        retryable = status >= 500
        return EngineError(
            f"{self._who}: {message or 'failed'}",
            status,
            kind="engine_error",
            retryable=retryable,
            blame=retryable,
        )
