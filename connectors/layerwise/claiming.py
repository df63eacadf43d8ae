"""P asks D whether it may write: handshake and claim, again while D renews its endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from ascend_pd.errors import AscendPdError, RemoteProtocolError
from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Answer, Verdict
from connectors.handshake import Address
from connectors.layerwise.push import Push
from connectors.peers import Peer, PeerDirectory
from connectors.sidechannel.client import SideChannelClient

_HANDSHAKE_S = 10.0
_ANSWER_S = 10.0
_LATER_S = 0.25


class ClaimDenied(AscendPdError):
    """D answered, and the answer is no."""


def claim(
    push: Push,
    source: EngineRef,
    num_ranks: int,
    side_address: Address,
    *,
    sinks: PeerDirectory,
    client: SideChannelClient,
    given_up: Callable[[], bool],
) -> Peer:
    """D's sessions and the plan, once it has granted the claim. Blocks; call it on a lane.

    Raises:
        ClaimDenied: D refused, with its reason.
        AscendPdError: no handshake or no answer in time, or the two may not be paired.
    """
    reservation = push.reserved
    engine = EngineRef(reservation.sink_engine_id, reservation.sink_epoch)
    until = time.monotonic() + _ANSWER_S
    while True:
        sink = sinks.peer(push.address, engine, _HANDSHAKE_S, reservation.endpoints)
        answer = client.request(
            push.address, push.claim(source, num_ranks, side_address, sink.endpoints), _ANSWER_S
        )
        if not isinstance(answer, Answer):
            raise RemoteProtocolError(f"answered a claim with {type(answer).__name__}")
        if answer.verdict is Verdict.OK:
            return sink
        if answer.verdict is not Verdict.LATER or given_up() or time.monotonic() > until:
            raise ClaimDenied(f"decode refused the claim: {answer.reason}")
        sinks.forget(push.address)
        time.sleep(_LATER_S)
