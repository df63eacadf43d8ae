"""A whole engine without a model: vLLM's scheduler, both sides of our connector, and vLLM's own order of hooks.

The forward pass writes a number into every cell of the KV cache that tells its token, so that what arrives
elsewhere can be checked. With a fake NPU it is written late, on the compute stream.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import connectors.compat as compat
from tests.engine.compat.scheduler_rig import BLOCK, LAYERS, Rig, cache_config, engine_config

HEADS, SIZE, BLOCKS = 2, 16, 24
Cache = torch.Tensor | tuple[torch.Tensor, ...]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def joined_cache() -> Cache:
    """As vLLM's CPU attention has it: `[blocks, heads, tokens, K and V]`."""
    return torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=torch.int16)


def number(token: int, layer: int, part: int) -> int:
    """What the forward writes for a token; distinct for every token id, layer and part."""
    return token + 1000 * (2 * layer + part)


def cells(cache: Cache, block: int, offset: int) -> list[torch.Tensor]:
    """The places of one token, K and V apart where they lie apart."""
    if isinstance(cache, torch.Tensor):
        return [cache[block, :, offset]]
    return [tensor.view(torch.int16)[block, offset] for tensor in cache]


class Engine(Rig):
    """One engine core with one worker.

    Args:
        aggregates: the executor merges the workers' outputs; with one worker in the engine's own process there is
            none that does, and an output without news is dropped.
        hook: how this attention backend calls `save_kv_layer`.
        compute: runs a kernel; a fake NPU queues it.
        synchronize: waits for the compute stream, as taking a sampled token does.
    """

    def __init__(
        self,
        directory: Path,
        connector: str,
        role: str,
        caches: Sequence[Cache],
        *,
        extra: dict[str, Any] | None = None,
        policy: str = "fail",
        mla: bool = False,
        aggregates: bool = True,
        hook: Callable[[Any, str, Cache], None] | None = None,
        compute: Callable[[Callable[[], None]], None] = lambda kernel: kernel(),
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        port = free_port()
        config = engine_config(
            directory, connector, "connectors", role=role, policy=policy, extra=extra, kv_port=port
        )
        super().__init__(config, BLOCKS, mla)
        self.caches = dict(zip(LAYERS, caches, strict=True))
        self._compute = compute
        self._synchronize = synchronize
        self._hook = hook or (lambda worker, name, cache: worker.save_kv_layer(name, cache, None))
        with set_current_vllm_config(config):
            self.worker = KVConnectorFactory.create_connector(
                config, compat.KVConnectorRole.WORKER, cache_config(BLOCKS, mla)
            )
        self.worker.register_kv_caches(self.caches)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self._aggregator = KVOutputAggregator(1) if aggregates else None

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()

    def run_step(self) -> Any:
        """One step with the hooks in the order of this series' own runner."""
        scheduled = self.scheduler.schedule()
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            self.worker.handle_preemptions(scheduled.kv_connector_metadata)
            if scheduled.total_num_scheduled_tokens:
                with (
                    set_forward_context({}, self.config),
                    KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as reported,
                ):
                    self._forward(scheduled)
                if any(self._samples(request_id) for request_id in scheduled.num_scheduled_tokens):
                    self._synchronize()
            else:
                output = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
                reported = output.kv_connector_output
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        if self._aggregator is not None:
            merged = self._aggregator.aggregate(
                [ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=reported)]
            )
            reported = merged.kv_connector_output
        elif reported is not None and reported.is_empty():
            reported = None
        self.finish_step(scheduled, reported)
        return scheduled

    def _samples(self, request_id: str) -> bool:
        request = self.scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def _forward(self, scheduled: Any) -> None:
        places = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for position in range(request.num_computed_tokens - count, request.num_computed_tokens):
                token = request.all_token_ids[position]
                places.append((block_ids[position // BLOCK], position % BLOCK, token))
        for layer, name in enumerate(LAYERS):
            self._compute(lambda layer=layer, name=name: self._write(layer, name, places))
            self._hook(self.worker, name, self.caches[name])

    def _write(self, layer: int, name: str, places: list[tuple[int, int, int]]) -> None:
        for block, offset, token in places:
            for part, cell in enumerate(cells(self.caches[name], block, offset)):
                cell.fill_(number(token, layer, part))

    def wrong_cells(self, request_id: str, num_tokens: int) -> list[tuple[int, int, int]]:
        """(layer, position, part) of what is not the cache of this request's prompt."""
        request = self.scheduler.requests[request_id]
        (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        wrong = []
        for layer, name in enumerate(LAYERS):
            for position in range(num_tokens):
                for part, cell in enumerate(
                    cells(self.caches[name], block_ids[position // BLOCK], position % BLOCK)
                ):
                    if not bool((cell == number(request.all_token_ids[position], layer, part)).all()):
                        wrong.append((layer, position, part))
        return wrong


def step_until(condition: Callable[[], Any], *engines: Engine, within_s: float = 60.0) -> None:
    """Step all engines until something holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s")
        for engine in engines:
            if engine.scheduler.has_requests():
                engine.run_step()
        time.sleep(0.002)


def one_rank(monkeypatch: Any) -> None:
    """No process groups: this worker is rank 0 of 1."""
    alone = type("Group", (), {"rank_in_group": 0, "world_size": 1})()
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: alone)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: alone)
