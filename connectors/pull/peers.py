"""The prefill engines that a decode worker reads from: handshake, fingerprint, and the plan for each pair."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ascend_pd.errors import PairingError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.plan import TransferPlan, pull_plan
from ascend_pd.wire.identity import EngineRef, Fingerprint
from ascend_pd.wire.messages import WorkerInfo
from connectors.handshake import Address, shake_hands
from connectors.sidechannel.client import SideChannelClient

MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """One life of a prefill engine, and what this worker reads from it."""

    engine: EngineRef
    plan: TransferPlan
    workers: dict[int, WorkerInfo]
    """By worker number (`KVLayout.worker`)."""


class PeerDirectory:
    """Handshakes at first contact and again whenever the peer turns out to live another epoch."""

    def __init__(
        self,
        client: SideChannelClient,
        fingerprint: Fingerprint,
        layout: KVLayout,
        transport_name: str,
        expected_tp: int = 0,
    ) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._layout = layout
        self._transport_name = transport_name
        self._expected_tp = expected_tp
        self._sources: OrderedDict[Address, Source] = OrderedDict()
        self._lock = threading.Lock()

    def source(self, address: Address, engine: EngineRef, timeout_s: float) -> Source:
        """The prefill engine `engine` at `address`.

        Raises:
            PairingError: the two may not work together, or the engine was restarted; the reason is for the client.
            UnreachableError: no answer within `timeout_s`.
            RemoteProtocolError: the peer speaks something else.
        """
        with self._lock:
            known = self._sources.get(address)
            if known is not None and known.engine == engine:
                self._sources.move_to_end(address)
                return known
        found = self._handshake(address, timeout_s)
        with self._lock:
            self._sources[address] = found
            while len(self._sources) > MAX_PEERS:
                self._sources.popitem(last=False)
        if found.engine != engine:
            raise PairingError(f"prefill engine {engine} is gone: {found.engine} answers now")
        return found

    def forget(self, address: Address) -> None:
        """Shake hands again before the next read."""
        with self._lock:
            self._sources.pop(address, None)

    def _handshake(self, address: Address, timeout_s: float) -> Source:
        reply = shake_hands(
            self._client,
            address,
            self._fingerprint,
            role="decode",
            transport_name=self._transport_name,
            expected_tp=self._expected_tp,
            timeout_s=timeout_s,
        )
        return Source(
            engine=reply.engine,
            plan=pull_plan([worker.layout for worker in reply.workers], self._layout),
            workers={worker.layout.worker: worker for worker in reply.workers},
        )
