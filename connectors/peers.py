"""The engines that a worker moves bytes to or from: handshake, fingerprint, and the plan for each pair of workers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ascend_pd.errors import PairingError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.plan import TransferPlan, pull_plan, push_plan
from ascend_pd.wire.identity import EngineRef, Fingerprint
from ascend_pd.wire.messages import WorkerInfo
from connectors.handshake import Address, shake_hands
from connectors.sidechannel.client import SideChannelClient

MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of the other engine between two fences, and what this worker moves to or from it."""

    engine: EngineRef
    endpoints: int
    """How often it was fenced."""
    plan: TransferPlan
    workers: dict[int, WorkerInfo]
    """By worker number (`KVLayout.worker`)."""


class PeerDirectory:
    """Handshakes at first contact, and again for another epoch or after a fence of the peer.

    Args:
        layout: this worker's; `push`: it is on P and writes (layer-wise), otherwise on D and reads.
        expected_tp: the peer's TP size when the configuration names it.
        checksum: compare what is moved; the peer must be ready for it, or not expect it either.
    """

    def __init__(
        self,
        client: SideChannelClient,
        fingerprint: Fingerprint,
        layout: KVLayout,
        transport_name: str,
        expected_tp: int = 0,
        *,
        push: bool,
        checksum: bool = False,
    ) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._layout = layout
        self._transport_name = transport_name
        self._expected_tp = expected_tp
        self._push = push
        self._checksum = checksum
        self._peers: OrderedDict[Address, Peer] = OrderedDict()
        self._lock = threading.Lock()

    def peer(self, address: Address, engine: EngineRef, timeout_s: float, endpoints: int = 0) -> Peer:
        """The engine `engine` at `address`, its sessions at least as new as `endpoints`.

        Raises:
            PairingError: the two may not work together, or the engine was restarted; the reason is for the client.
            UnreachableError: no answer within `timeout_s`.
            RemoteProtocolError: the peer speaks something else.
        """
        with self._lock:
            known = self._peers.get(address)
            if known is not None and known.engine == engine and known.endpoints >= endpoints:
                self._peers.move_to_end(address)
                return known
        found = self._handshake(address, timeout_s)
        with self._lock:
            self._peers[address] = found
            while len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        if found.engine != engine:
            role = "decode" if self._push else "prefill"
            raise PairingError(f"{role} engine {engine} is gone: {found.engine} answers now")
        return found

    def forget(self, address: Address) -> None:
        """Shake hands again before the next transfer."""
        with self._lock:
            self._peers.pop(address, None)

    def _handshake(self, address: Address, timeout_s: float) -> Peer:
        reply = shake_hands(
            self._client,
            address,
            self._fingerprint,
            role="prefill" if self._push else "decode",
            transport_name=self._transport_name,
            expected_tp=self._expected_tp,
            timeout_s=timeout_s,
        )
        if any(worker.checksums is not self._checksum for worker in reply.workers):
            here, there = ("on", "off") if self._checksum else ("off", "on")
            raise PairingError(
                f"connector.checksum is {here} here and {there} at {reply.engine}: say the same for both"
            )
        layouts = [worker.layout for worker in reply.workers]
        return Peer(
            engine=reply.engine,
            endpoints=reply.endpoints,
            plan=push_plan(self._layout, layouts) if self._push else pull_plan(layouts, self._layout),
            workers={worker.layout.worker: worker for worker in reply.workers},
        )
