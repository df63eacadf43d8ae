"""P's writes of one rank: what is ready of a transfer goes to D's workers and, if so configured, is compared there."""

from __future__ import annotations

import uuid

from ascend_pd.errors import TransferError
from ascend_pd.layout.description import KVLayout
from connectors.device.base import Device
from connectors.layerwise.progress import Batch
from connectors.layerwise.push import Push
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.base import Transport
from connectors.transport.checksum import Verifier
from connectors.transport.mover import Mover


class Writer:
    """Thread-safe; transfers to different engines run side by side.

    Args:
        layout: this worker's.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        device: Device,
        transport: Transport,
        client: SideChannelClient,
        layout: KVLayout,
    ) -> None:
        config = settings.config
        self._mover = Mover(
            device,
            transport,
            client,
            f"{settings.engine_id}/{uuid.uuid4().hex}",
            layout,
            push=True,
            staging_bytes=config.staging_bytes,
        )
        self._verifier = Verifier(device, client, layout, push=True) if config.checksum else None

    def write(self, push: Push, batches: list[Batch], deadline: float, via: str) -> None:
        """Returns when the last byte is acknowledged.

        Raises:
            TransferError: as `Transport.write`; the device did not finish these layers in time; or D has not received
                what was sent.
            RemoteProtocolError: the reservation's blocks do not fit the prompt or D's cache.
        """
        for batch in batches:
            for event in batch.after:
                if not event.wait(deadline):
                    raise TransferError("the device did not finish a layer in time", quiesced=True)
            for worker, request in push.requests():
                tokens = batch.first, batch.end
                push.bytes_sent += self._mover.move(worker, request, tokens, deadline, via, batch.layers)
        if self._verifier is not None:
            self._verify(self._verifier, push, batches, deadline)

    def session_closed(self) -> None:
        """The transport was rotated: nothing reads this worker's staging slots any more."""
        self._mover.fenced()

    def close(self) -> None:
        """End the mover's thread."""
        self._mover.close()

    @staticmethod
    def _verify(verifier: Verifier, push: Push, batches: list[Batch], deadline: float) -> None:
        """Now, not at the end: a preempted prompt is computed anew elsewhere, not to the bit as it was sent."""

        def given_up() -> bool:
            return push.preempted  # vLLM waits for the blocks; what is unchecked was acknowledged all the same

        for worker, request in push.requests():
            for batch in batches:
                tokens = batch.first, batch.end
                verifier.verify(worker, request, tokens, deadline, batch.layers, given_up)
