"""How much of a request's cached prefix was computed before the step that it is scheduled in.

vLLM puts a block into its prefix cache when it is allocated, not when it is computed: two requests of one step may
share blocks that only this step's forward writes. What is pushed before that would be what the block held before.
"""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput

from connectors.compat import BlockIds


class StepWrites:
    """The blocks that one step writes, as far as the scheduler's output tells; where it does not, everything."""

    def __init__(self, output: SchedulerOutput, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()
        self._unknown = False
        for new in output.scheduled_new_reqs:
            self._add(new.block_ids, new.num_computed_tokens // block_size)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            resumed = request_id in cached.resumed_req_ids
            self._add(block_ids or (), computed // block_size if resumed else 0)
            end = computed + output.num_scheduled_tokens[request_id]
            # A block begun in an earlier step becomes whole, and with that cached, in this one: its id is not said.
            self._unknown |= (
                not resumed and bool(computed % block_size) and end // block_size > computed // block_size
            )

    def settled(self, block_ids: BlockIds, num_computed: int) -> int:
        """The tokens, from the first one on, that no step from this one on writes.

        Args:
            block_ids: all of the request's, per KV cache group; num_computed: where its own computing begins.
        """
        if self._unknown or len(block_ids) != 1:
            return 0
        cached = block_ids[0][: -(-num_computed // self._block_size)]
        for index, block in enumerate(cached):
            if block in self._blocks:
                return index * self._block_size
        return num_computed

    def _add(self, block_ids: BlockIds, first: int) -> None:
        for group in block_ids:
            self._blocks.update(group[first:])
