"""Watches instances: is the endpoint healthy, and who answers on its side channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ascend_pd.errors import ProtocolError, UnreachableError
from proxy.errors import LegFailed
from proxy.fleet import Fleet, Instance
from proxy.settings import ProbeSettings
from proxy.sidechannel import SideChannel
from proxy.upstream import Upstream

_log = logging.getLogger("proxy.probes")


class Probes:
    """One task that probes all instances side by side, once per interval."""

    def __init__(self, settings: ProbeSettings, fleet: Fleet, upstream: Upstream, channel: SideChannel) -> None:
        self._settings = settings
        self._fleet = fleet
        self._upstream = upstream
        self._channel = channel
        self._failures: dict[str, int] = {}
        self._seen: set[str] = set()
        """Instances that have been healthy once: one that never was is taken out by its first failed probe."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to probe, the first time at once."""
        if self._settings.interval_s > 0:
            self._task = asyncio.create_task(self._run(), name="probes")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self.probe_all()
            await asyncio.sleep(self._settings.interval_s)

    async def probe_all(self) -> None:
        """One round."""
        instances = self._fleet.instances()
        await asyncio.gather(*(self._probe_apart(i) for i in instances))
        present = {i.key for i in instances}
        self._failures = {key: n for key, n in self._failures.items() if key in present}
        self._seen &= present

    async def first(self, instance: Instance) -> None:
        """Probe one that is about to be taken in: it has no past, so one failure is enough."""
        if self._settings.interval_s > 0:
            self._seen.discard(instance.key)
            await self._probe_apart(instance)
        else:
            await self._identify(instance)  # nobody would take it back

    async def _probe_apart(self, instance: Instance) -> None:
        """Whatever goes wrong with one instance, the others are watched on, and it is tried again."""
        try:
            await self.probe(instance)
        except Exception as error:  # noqa: BLE001 - the loop's top: one instance must not end it
            _log.exception("the probe of %s broke", instance.key)
            self._judge(instance, f"cannot be probed: {type(error).__name__}")

    async def probe(self, instance: Instance) -> None:
        """One instance: its health, then its identity."""
        if await self._answers(instance):
            self._failures.pop(instance.key, None)
            self._seen.add(instance.key)
            await self._identify(instance)
            unsound = instance.identity.unsound if instance.identity is not None else ""
            self._judge(instance, f"must be restarted: {unsound}" if unsound else "")
            return
        failures = self._failures[instance.key] = self._failures.get(instance.key, 0) + 1
        if failures >= (self._settings.failures if instance.key in self._seen else 1):
            self._judge(instance, f"failed {failures} probes in a row")

    @staticmethod
    def _judge(instance: Instance, complaint: str) -> None:
        """Take the instance out or back, and say so once."""
        if complaint and instance.healthy:
            _log.error("instance %s gets no new work: it %s", instance.key, complaint)
        elif not complaint and not instance.healthy:
            _log.info("instance %s is healthy again", instance.key)
        instance.healthy = not complaint

    async def _answers(self, instance: Instance) -> bool:
        try:
            answer = await self._upstream.get(
                instance.settings.url, "/health", instance.role, self._settings.timeout_s
            )
            await answer.read(self._settings.timeout_s)
        except LegFailed:
            return False
        return answer.status == 200

    async def _identify(self, instance: Instance) -> None:
        if not instance.settings.side:
            return
        try:
            instance.identity = await self._channel.hello(instance.settings.side, self._settings.timeout_s)
        except (UnreachableError, ProtocolError) as error:
            _log.info("side channel of %s: %s", instance.key, error)
