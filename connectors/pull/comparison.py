"""D compares what it has read with what P holds; without P's hold there is nothing to compare with."""

from __future__ import annotations

from ascend_pd.errors import ProtocolError, TransferError, UnreachableError
from ascend_pd.wire.messages import Ask, Story, WorkerInfo
from connectors.handshake import Address
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.checksum import Verifier
from connectors.transport.stage_peer import StagedRequest

_ANSWER_S = 2.0


class Comparison:
    """One per rank of D."""

    def __init__(self, verifier: Verifier, client: SideChannelClient) -> None:
        self._verifier = verifier
        self._client = client

    def compare(
        self,
        address: Address,
        transfer_id: str,
        worker: WorkerInfo,
        request: StagedRequest,
        tokens: tuple[int, int],
        deadline: float,
    ) -> None:
        """After a read. `address` is P's side channel.

        Raises:
            TransferError: the bytes differ, or P let go of its own; nothing is in flight.
        """
        try:
            self._verifier.verify(worker, request, tokens, deadline)
        except TransferError as error:
            over = self._why_released(address, transfer_id)
            if over is None:
                raise
            why = f"prefill let go of the blocks before they were compared: {over}"
            raise TransferError(why, quiesced=True) from error

    def _why_released(self, address: Address, transfer_id: str) -> str | None:
        """The reason, when P's hold is over: its blocks hold something else by now, which is no corruption."""
        try:
            story = self._client.request(address, Ask(transfer_id=transfer_id), _ANSWER_S)
        except (ProtocolError, UnreachableError):
            return None
        return story.reason or "released" if isinstance(story, Story) and story.state == "released" else None
