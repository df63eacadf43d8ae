"""How much of a request's cached prefix was computed before the step that it is scheduled in.

vLLM puts a block into its prefix cache when a step that fills it is scheduled, not when it is computed: two requests
of one step may share blocks that only this step's forward writes. What is pushed before that would be what the block
held before.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm.v1.core.sched.output import SchedulerOutput

from connectors.compat import BlockIds


class BlockTables:
    """The blocks of every request that runs, as the scheduler's outputs tell, and which of them a step writes.

    Every request's, not only those that are pushed; and all blocks, for a step may write what an earlier one
    allocated (the rest of a block, speculative decoding's lookahead). Models with several KV cache groups are left
    out: of them nothing counts as settled.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}
        self._written: set[int] = set()

    def step(self, output: SchedulerOutput) -> None:
        """Take in what the scheduler says of the next step."""
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        self._written = set()
        for request_id, blocks, replaces, computed in _scheduled(output):
            if len(blocks) > 1:
                continue
            added = list(blocks[0]) if blocks else []
            if replaces:
                self._tables[request_id] = added
            else:
                self._tables.setdefault(request_id, []).extend(added)
            end = computed + output.num_scheduled_tokens[request_id]
            table = self._tables[request_id]
            self._written.update(table[computed // self._block_size : -(-end // self._block_size)])

    def settled(self, block_ids: BlockIds, num_computed: int) -> int:
        """The tokens, from the first one on, that were computed before this step.

        Args:
            block_ids: all of the request's, per KV cache group; num_computed: where its own computing begins.
        """
        if len(block_ids) != 1:
            return 0
        cached = block_ids[0][: -(-num_computed // self._block_size)]
        for index, block in enumerate(cached):
            if block in self._written:
                return min(index * self._block_size, num_computed)
        return num_computed


def _scheduled(output: SchedulerOutput) -> Iterator[tuple[str, BlockIds, bool, int]]:
    """(request id, block ids, whether they are all of it, tokens computed before)."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield request_id, block_ids or (), request_id in cached.resumed_req_ids, computed
