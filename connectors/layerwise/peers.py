"""The decode engines that a prefill worker writes to: handshake, fingerprint, and the plan for each pair."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ascend_pd.errors import PairingError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.plan import TransferPlan, push_plan
from ascend_pd.wire.identity import EngineRef, Fingerprint
from connectors.handshake import Address, shake_hands
from connectors.sidechannel.client import SideChannelClient

MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Sink:
    """One life of a decode engine between two fences, and what this worker writes to it."""

    engine: EngineRef
    endpoints: int
    plan: TransferPlan
    sessions: dict[int, str]
    """Transport session by worker number (`KVLayout.worker`)."""


class SinkDirectory:
    """Handshakes at first contact, and again for another epoch or after a fence of the peer."""

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
        self._sinks: OrderedDict[Address, Sink] = OrderedDict()
        self._lock = threading.Lock()

    def sink(self, address: Address, engine: EngineRef, endpoints: int, timeout_s: float) -> Sink:
        """The decode engine `engine` at `address`, its sessions at least as new as `endpoints`.

        Raises:
            PairingError: the two may not work together, or the engine was restarted; the reason is for the client.
            UnreachableError: no answer within `timeout_s`.
            RemoteProtocolError: the peer speaks something else.
        """
        with self._lock:
            known = self._sinks.get(address)
            if known is not None and known.engine == engine and known.endpoints >= endpoints:
                self._sinks.move_to_end(address)
                return known
        reply = shake_hands(
            self._client,
            address,
            self._fingerprint,
            role="prefill",
            transport_name=self._transport_name,
            expected_tp=self._expected_tp,
            timeout_s=timeout_s,
        )
        if reply.engine != engine:
            raise PairingError(f"decode engine {engine} is gone: {reply.engine} answers now")
        found = Sink(
            engine=reply.engine,
            endpoints=reply.endpoints,
            plan=push_plan(self._layout, [worker.layout for worker in reply.workers]),
            sessions={worker.layout.worker: worker.session for worker in reply.workers},
        )
        with self._lock:
            self._sinks[address] = found
            while len(self._sinks) > MAX_PEERS:
                self._sinks.popitem(last=False)
        return found

    def forget(self, address: Address) -> None:
        """Shake hands again before the next push."""
        with self._lock:
            self._sinks.pop(address, None)
