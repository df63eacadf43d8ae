"""First contact with another engine: who it is, and whether the two may exchange KV cache."""

from __future__ import annotations

from ascend_pd.errors import PairingError, RemoteProtocolError
from ascend_pd.wire.identity import Fingerprint, mismatches
from ascend_pd.wire.messages import Answer, Hello, HelloReply
from connectors.sidechannel.client import SideChannelClient

Address = tuple[str, int]


def shake_hands(
    client: SideChannelClient,
    address: Address,
    fingerprint: Fingerprint,
    *,
    role: str,
    transport_name: str,
    expected_tp: int,
    timeout_s: float,
) -> HelloReply:
    """Ask the engine at `address` who it is, and refuse it where the two cannot work together.

    Args:
        role: this engine's, `prefill` or `decode`.
        expected_tp: the peer's TP size when the configuration names it, else 0.

    Raises:
        PairingError: fingerprints, transports or the named TP size differ, with all fields and both values.
        UnreachableError: no answer within `timeout_s`.
        RemoteProtocolError: the peer speaks something else.
    """
    reply = client.request(address, Hello(fingerprint=fingerprint, role=role), timeout_s)
    if isinstance(reply, Answer):
        raise PairingError(reply.reason)
    if not isinstance(reply, HelloReply):
        raise RemoteProtocolError(f"answered a handshake with {type(reply).__name__}")
    if reply.unsound:
        raise PairingError(f"{reply.engine} must be restarted: {reply.unsound}")
    prefill, decode = (fingerprint, reply.fingerprint) if role == "prefill" else (reply.fingerprint, fingerprint)
    differing = mismatches(prefill, decode)
    if differing:
        raise PairingError("fingerprints differ: " + "; ".join(map(str, differing)))
    if expected_tp and reply.tp_size != expected_tp:
        raise PairingError(f"the configuration names tp_size {expected_tp}, the peer has {reply.tp_size}")
    others = {worker.transport for worker in reply.workers} - {transport_name}
    if others:
        raise PairingError(f"transport: the peer has {', '.join(sorted(others))}, this engine {transport_name}")
    return reply
