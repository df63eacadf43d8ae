"""Looks after transfers between the legs: renews P's hold while D queues, lets go at once when D will not come,
fetches what the connectors know of a transfer.

Nothing here delays a client's answer: everything but `reason` runs in the background, within bounds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from ascend_pd.errors import ProtocolError, UnreachableError
from ascend_pd.metaserver_client import MetaserverClient
from ascend_pd.wire.messages import Story, Verdict
from proxy.dialects import Hold
from proxy.sidechannel import SideChannel

_log = logging.getLogger("proxy.holds")
MAX_BACKGROUND = 4096
ANSWER_S = 2.0
REASON_S = 1.0


class Keeper:
    """Renews one hold until told to stop; a hold that is gone needs no more renewing."""

    __slots__ = ("_handle", "_hold", "_holds", "stopped")

    def __init__(self, holds: Holds, hold: Hold) -> None:
        self._holds = holds
        self._hold = hold
        self.stopped = False
        self._handle = asyncio.get_running_loop().call_later(hold.lease_s / 3, self._renew)

    def stop(self) -> None:
        """D has the blocks, or will not come."""
        self.stopped = True
        self._handle.cancel()

    def _renew(self) -> None:
        if not self.stopped:
            self._holds.background(self._renew_once())

    async def _renew_once(self) -> None:
        hold = self._hold
        answer = await self._holds.channel.renew(hold.side, hold.transfer_id, hold.epoch, hold.lease_s / 3)
        if self.stopped:
            return
        if answer.verdict is not Verdict.OK:
            self.stopped = True
            return
        self._handle = asyncio.get_running_loop().call_later(hold.lease_s / 3, self._renew)


class Holds:
    """The side-channel work of all exchanges."""

    def __init__(self, channel: SideChannel, metaserver: MetaserverClient) -> None:
        self.channel = channel
        self._metaserver = metaserver
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, hold: Hold) -> Keeper | None:
        """Renew this hold from now on; None when it cannot be renewed."""
        return Keeper(self, hold) if hold.side and hold.lease_s > 0 else None

    def release(self, address: str, transfer_id: str, reason: str, epoch: str = "") -> None:
        """Tell an engine, in the background, that nobody will come."""
        if address:
            self.background(self._release(address, transfer_id, reason, epoch))

    def withdraw(self, metaserver: str, transfer_id: str, reason: str) -> None:
        """End a reservation at the metaserver, in the background, so that a P that waits for it is told."""
        if metaserver:
            deadline = time.monotonic() + ANSWER_S
            self.background(self._metaserver.withdraw(metaserver, transfer_id, reason or "over", deadline))

    async def _release(self, address: str, transfer_id: str, reason: str, epoch: str) -> None:
        await self.channel.release(address, transfer_id, reason, ANSWER_S, epoch)

    async def stories(self, addresses: Iterable[str], transfer_id: str) -> list[Story | None]:
        """What each of these engines knows, in order; None where there is no address or no answer in time."""
        return list(await asyncio.gather(*(self._story(address, transfer_id) for address in addresses)))

    async def _story(self, address: str, transfer_id: str) -> Story | None:
        if not address:
            return None
        try:
            return await self.channel.ask(address, transfer_id, REASON_S)
        except (UnreachableError, ProtocolError):
            return None

    async def reason(self, addresses: Iterable[str], transfer_id: str) -> str:
        """Why a transfer failed, by the first of these engines that kept a reason; empty when none did."""
        for story in await self.stories(addresses, transfer_id):
            if story is not None and story.known and story.reason:
                return story.reason
        return ""

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to its own deadline; dropped when too much is under way (leases then do its work)."""
        if len(self._tasks) >= MAX_BACKGROUND:
            work.close()
            return
        task = asyncio.create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (UnreachableError, ProtocolError) as error:
            _log.info("side channel: %s", error)

    async def close(self) -> None:
        """Let releases that are under way end, within their deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_S)
        for task in self._tasks:
            task.cancel()
        await self.channel.close()
        await self._metaserver.close()
