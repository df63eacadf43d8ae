"""Passes an engine's answer on: a stream event by event, without looking into tokens; anything else whole."""

from __future__ import annotations

from collections.abc import Callable

from proxy.downstream import Downstream
from proxy.errors import LegFailed
from proxy.settings import TimeoutSettings
from proxy.sse import ENDS, ErrorEvent, EventCutter, ends_stream, find_error, read_error
from proxy.upstream import Answer

END_S = 1.0
"""How long an engine may take to end its body after [DONE]; its client has everything by then."""


class EngineError(LegFailed):
    """The engine reported an error; its connector may know the reason."""


class Relay:
    """One answering leg.

    Args:
        says_done: the stream's last event is `data: [DONE]`; else it ends with its body.
        on_first: called once, with the first event (or a whole good answer) in hand.
    """

    def __init__(
        self,
        answer: Answer,
        down: Downstream,
        timeouts: TimeoutSettings,
        who: str,
        says_done: bool,
        on_first: Callable[[], None],
    ) -> None:
        self._answer = answer
        self._down = down
        self._timeouts = timeouts
        self._who = who
        self._says_done = says_done
        self._on_first = on_first
        self._cutter = EventCutter()
        self._done = False
        """[DONE] has come: whatever the engine does now, the answer is whole."""
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
        if answer.status == 200:
            self._on_first()
        await self._down.whole(answer.status, body, answer.content_type)

    async def _stream(self, first_s: float) -> None:
        events = await self._first_events(first_s)
        self._on_first()
        await self._down.start_stream()
        self._pass_on(events)
        try:
            await self._answer.pipe(self._sink, self._patience_s())
        except LegFailed:
            if self._failure is None and not self._done:
                raise
        if self._failure is not None:
            raise self._failure
        if not self._done and (self._says_done or self._cutter.rest()):
            raise LegFailed(f"{self._who} broke off its answer", kind="connection_lost")
        await self._down.end()

    async def _first_events(self, first_s: float) -> bytes:
        while piece := await self._answer.piece(first_s):
            if events := self._cut(piece):
                error = find_error(events)
                if error is not None:
                    raise self._error(error.status, error.message)
                return events
        raise LegFailed(f"{self._who} ended its answer before its first event", kind="connection_lost")

    def _sink(self, piece: bytes) -> None:
        if self._failure is not None or self._done:
            return
        events = self._cut(piece)
        if not events:
            return
        error = find_error(events)
        if error is None:
            self._pass_on(events)
        else:
            self._break_off(error)

    def _break_off(self, error: ErrorEvent) -> None:
        self._failure = self._error(error.status, error.message)
        if error.before:
            self._pass_on(error.before)
        self._answer.close()

    def _cut(self, piece: bytes) -> bytes:
        try:
            return self._cutter.feed(piece)
        except ValueError as error:
            self._failure = LegFailed(f"{self._who}: {error}", kind="bad_stream")
            self._answer.close()
            return b""

    def _pass_on(self, events: bytes) -> None:
        self.events += 1
        if events.endswith(ENDS) and self._says_done and ends_stream(events):
            self._done = True
            self._answer.resume(END_S)
        if not self._down.write_now(events, self._writable) and not self._done:
            self._answer.pause()

    def _writable(self) -> None:
        self._answer.resume(self._patience_s())

    def _patience_s(self) -> float:
        return END_S if self._done else self._timeouts.inter_token_s

    def _error(self, status: int, message: str) -> LegFailed:
        retryable = status >= 500
        return EngineError(
            f"{self._who}: {message or 'failed'}",
            status,
            kind="engine_error",
            retryable=retryable,
            blame=retryable,
        )
