"""What D keeps of each layer-wise request beside the sink machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_pd.wire.params import LayerwiseDecode
from connectors.compat.features import BlockIds


@dataclass(slots=True)
class Reserved:
    """Blocks that wait for P's writes."""

    request_id: str
    transfer_id: str
    metaserver: str
    block_ids: BlockIds
    num_cached: int
    since: float
    settled: bool = False
    source_address: tuple[str, int] | None = None
    num_bytes: int = 0

    def pushed_blocks(self, block_size: int) -> set[int]:
        """The blocks that P writes; D's prefix hit is not among them."""
        return set(self.block_ids[0][self.num_cached // block_size :])


class ReservedBook:
    """Requests on their way from arrival to the end of their receive. A request is expected once only: asked again
    after a failed load, vLLM hears of no external tokens."""

    def __init__(self) -> None:
        self.expected: dict[str, LayerwiseDecode] = {}
        self.by_request: dict[str, Reserved] = {}
        self.by_transfer: dict[str, Reserved] = {}
        self._waiting: set[str] = set()

    def expect(self, request_id: str, params: LayerwiseDecode) -> bool:
        """False when another request of this engine has the same transfer id."""
        if params.transfer_id in self._waiting or params.transfer_id in self.by_transfer:
            return False
        self._waiting.add(params.transfer_id)
        self.expected[request_id] = params
        return True

    def decline(self, request_id: str) -> LayerwiseDecode:
        """No transfer for this request."""
        params = self.expected.pop(request_id)
        self._waiting.discard(params.transfer_id)
        return params

    def reserve(self, request_id: str, block_ids: BlockIds, num_cached: int, now: float) -> Reserved:
        """The request's blocks are there."""
        params = self.decline(request_id)
        blocks = tuple(list(ids) for ids in block_ids)
        reserved = Reserved(request_id, params.transfer_id, params.metaserver, blocks, num_cached, now)
        self.by_request[request_id] = reserved
        self.by_transfer[params.transfer_id] = reserved
        return reserved

    def end(self, transfer_id: str) -> Reserved:
        """The receive is over."""
        reserved = self.by_transfer.pop(transfer_id)
        self.by_request.pop(reserved.request_id, None)
        return reserved
