"""P's writes of one rank: what is ready of a transfer goes to D's workers and, if so configured, is compared there."""

from __future__ import annotations

from connectors.layerwise.progress import Batch
from connectors.layerwise.push import Push
from connectors.transport.base import Transport
from connectors.transport.checksum import Verifier


class Writer:
    """Thread-safe; transfers to different engines run side by side."""

    def __init__(self, transport: Transport, verifier: Verifier | None) -> None:
        self._transport = transport
        self._verifier = verifier

    def write(self, push: Push, batches: list[Batch], deadline: float, via: str) -> None:
        """Returns when the last byte is acknowledged.

        Raises:
            TransferError: as `Transport.write`, or D has not received what was sent.
            RemoteProtocolError: the reservation's blocks do not fit the prompt or D's cache, or D adds nothing up.
        """
        for session, pieces in push.pieces(batches, deadline):
            self._transport.write(session, pieces, deadline, via)
            push.bytes_sent += pieces.num_bytes
        if self._verifier is not None:
            self._verify(self._verifier, push, batches, deadline)

    @staticmethod
    def _verify(verifier: Verifier, push: Push, batches: list[Batch], deadline: float) -> None:
        """Now, not at the end: a preempted prompt is computed anew elsewhere, not to the bit as it was sent."""

        def given_up() -> bool:
            return push.preempted  # vLLM waits for the blocks; what is unchecked was acknowledged all the same

        for worker, request in push.requests():
            for batch in batches:
                tokens = batch.first, batch.end
                verifier.verify(worker, request, tokens, deadline, batch.layers, given_up)
