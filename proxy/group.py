"""Runs the members of a split request side by side and writes one joint answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from proxy.downstream import Downstream
from proxy.errors import LegFailed, ProxyError
from proxy.split import JointStream, Member, joined
from proxy.sse import payload_of, read_error, split_events

RunMember = Callable[[Member, Downstream], Awaitable[None]]


class _Refusal(Exception):
    """A member's engine refused (4xx): the joint answer is this refusal."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.content_type = content_type


class _Place:
    """A member's downstream: its place in the joint answer."""

    def __init__(self, group: Group, member: Member) -> None:
        self._group = group
        self._member = member
        self.started = False

    async def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.started = True
        if status != 200:
            raise _Refusal(status, body, content_type)
        self._group.answers.append((self._member, body))

    async def start_stream(self) -> None:
        self.started = True
        await self._group.start_stream()

    def write_now(self, events: bytes, on_writable: Callable[[], None]) -> bool:
        return self._group.write(self._member, events, on_writable)

    async def end(self) -> None:
        """The joint stream ends when all members have."""


class Group:
    """One joint answer."""

    def __init__(self, down: Downstream, stream: bool) -> None:
        self._down = down
        self._stream = stream
        self._joint = JointStream()
        self._starting: asyncio.Task[None] | None = None
        self._broken: LegFailed | None = None
        self.answers: list[tuple[Member, bytes]] = []

    async def run(self, parts: list[Member], run_member: RunMember, at_once: int) -> None:
        """All members, at most `at_once` at a time; the first failure ends the others.

        Raises:
            ProxyError: a member failed for good.
        """
        gate = asyncio.Semaphore(at_once)

        async def guarded(member: Member) -> None:
            async with gate:
                await run_member(member, _Place(self, member))

        try:
            async with asyncio.TaskGroup() as tasks:
                for member in parts:
                    tasks.create_task(guarded(member))
        except* _Refusal as refusals:
            first = _leaves(refusals)[0]
            if isinstance(first, _Refusal):
                await self._refuse(first)
        except* (ProxyError, TimeoutError) as errors:
            raise _leaves(errors)[0] from errors
        else:
            await self._finish()

    async def _refuse(self, refusal: _Refusal) -> None:
        if self._down.started:
            raise ProxyError(read_error(refusal.body)[1] or "refused by the engine", refusal.status)
        await self._down.whole(refusal.status, refusal.body, refusal.content_type)

    async def _finish(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._stream:
            await self.start_stream()
            self._down.write_now(self._joint.ending(), lambda: None)
            await self._down.end()
            return
        try:
            answers = [(m, msgspec.json.decode(body, type=dict[str, object])) for m, body in self.answers]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise LegFailed(f"an engine's answer is not valid JSON: {error}", kind="bad_answer") from error
        await self._down.whole(200, msgspec.json.encode(joined(answers)))

    async def start_stream(self) -> None:
        """The first member to have an event starts the joint stream."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._down.start_stream())
        await asyncio.shield(self._starting)

    def write(self, member: Member, events: bytes, on_writable: Callable[[], None]) -> bool:
        """Rewrite and pass on."""
        try:
            rewritten = b"".join(self._joint.chunk(member, payload_of(event)) for event in split_events(events))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._broken = LegFailed(f"an engine's chunk is not valid JSON: {error}", kind="bad_answer")
            return True
        return self._down.write_now(rewritten, on_writable) if rewritten else True


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
