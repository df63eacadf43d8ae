"""What the static rules look at: the file, what is derived from it, and the model's figures. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ascend_pd.check.arguments import flags_of
from ascend_pd.models.facts import DTYPE_BYTES, ModelFacts
from ascend_pd.models.hardware import CATALOGUE, HardwareFacts
from ascend_pd.spec.cluster import ClusterSpec, Hardware, PDCluster, PoolSpec, Role
from ascend_pd.spec.topology import Topology, derive_topology


@dataclass(frozen=True)
class Pool:
    """One pool with everything inherited filled in."""

    index: int
    spec: PoolSpec
    cluster: ClusterSpec
    facts: ModelFacts

    @property
    def path(self) -> str:
        """Its path in the file."""
        return f"$.spec.pools[{self.index}]"

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def hardware(self) -> HardwareFacts:
        """The catalogue's entry."""
        return CATALOGUE[self.spec.hardware]

    @property
    def is_npu(self) -> bool:
        """Whether it runs on NPUs."""
        return self.spec.hardware is not Hardware.CPU

    @cached_property
    def flags(self) -> dict[str, str]:
        """vLLM flags of `extraArgs`, the engine's and then the pool's."""
        return flags_of([*self.cluster.engine.extra_args, *self.spec.extra_args])

    @cached_property
    def env(self) -> dict[str, str]:
        """Environment from the file, the pool's over the engine's."""
        return {**self.cluster.engine.env, **self.spec.env}

    @property
    def model_path(self) -> str:
        """The model's directory."""
        return self.spec.overrides.model_path or self.cluster.model.path

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens."""
        return self.spec.overrides.max_model_len or self.cluster.model.max_model_len

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.spec.overrides.block_size or self.cluster.engine.block_size

    @property
    def dtype(self) -> str:
        """Of the weights' computation; `auto` becomes the model's own."""
        chosen = self.spec.overrides.dtype or self.cluster.model.dtype
        return self.facts.dtype if chosen == "auto" else chosen

    @property
    def kv_dtype(self) -> str:
        """Of the cache; `auto` becomes `dtype`."""
        chosen = self.spec.overrides.kv_cache_dtype or self.cluster.model.kv_cache_dtype
        return self.dtype if chosen == "auto" else chosen

    @property
    def kv_dtype_bytes(self) -> int:
        """Bytes of one cached element."""
        return DTYPE_BYTES.get(self.kv_dtype, 2)

    @property
    def batched_tokens(self) -> int:
        """Tokens of the largest step: given, or vLLM's default for serving."""
        return self.spec.max_num_batched_tokens or min(self.max_model_len, 8192)

    @cached_property
    def speculative(self) -> dict[str, Any] | None:
        """The speculative configuration; None when there is none, {} when it cannot be read."""
        prefix = "--speculative-config."
        dotted = {k.removeprefix(prefix): v for k, v in self.flags.items() if k.startswith(prefix)}
        text = self.flags.get("--speculative-config")
        if text is None:
            return dotted or None
        try:
            read = json.loads(text)
        except ValueError:
            return {}
        return {**read, **dotted} if isinstance(read, dict) else {}

    @property
    def context_parallel(self) -> int:
        """Prefill or decode context parallel size from `extraArgs`, the larger one."""
        sizes = ("--prefill-context-parallel-size", "--decode-context-parallel-size")
        return max(int(v) if (v := self.flags.get(flag, "1")).isdecimal() else 1 for flag in sizes)

    @cached_property
    def memory(self) -> MemoryBudget | None:
        """How one device's memory is used; None when a figure is missing or the device's size is not known."""
        return budget(self)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on one device of a pool, and what they hold."""

    usable: int
    weights: int
    activation: int
    kv_per_token: float

    @property
    def kv_bytes(self) -> int:
        """Left for the cache; negative when not even the weights fit."""
        return self.usable - self.weights - self.activation

    @property
    def tokens(self) -> int:
        """KV capacity of one engine in tokens."""
        return max(0, int(self.kv_bytes / self.kv_per_token))


FIXED_BYTES = 2 << 30
"""Runtime, communication buffers and captured graphs of one device; an estimate."""
ACTIVATION_COPIES = 12
"""Live copies of (tokens · hidden) at the peak of a step; an estimate."""


def budget(pool: Pool) -> MemoryBudget | None:
    """The arithmetic of `memory-short`."""
    parallel, facts = pool.spec.parallel, pool.facts
    weights = facts.weight_bytes_per_rank(parallel.tp, parallel.pp, parallel.dp)
    per_token = facts.kv_bytes_per_token_and_rank(parallel.tp, parallel.pp, pool.kv_dtype_bytes)
    if not pool.hardware.device_bytes or weights is None or not per_token:
        return None
    hidden = facts.hidden_size or (facts.attention_heads or 64) * (facts.head_dim or 128)
    activation = FIXED_BYTES + pool.batched_tokens * hidden * 2 * ACTIVATION_COPIES
    usable = int(pool.hardware.device_bytes * pool.spec.memory_fraction)
    return MemoryBudget(usable, int(weights), activation, per_token)


class Subject:
    """The whole cluster as the rules see it."""

    def __init__(self, cluster: PDCluster, facts: Mapping[str, ModelFacts]) -> None:
        """`facts` is by model path and has every path that a pool uses."""
        self.cluster = cluster
        self.spec = cluster.spec
        self.pools = tuple(
            Pool(i, pool, cluster.spec, facts[pool.overrides.model_path or cluster.spec.model.path])
            for i, pool in enumerate(cluster.spec.pools)
        )

    @cached_property
    def topology(self) -> Topology:
        """Everything derived."""
        return derive_topology(self.cluster)

    @cached_property
    def prefill(self) -> tuple[Pool, ...]:
        """Prefill pools."""
        return tuple(p for p in self.pools if p.spec.role is Role.PREFILL)

    @cached_property
    def decode(self) -> tuple[Pool, ...]:
        """Decode pools."""
        return tuple(p for p in self.pools if p.spec.role is Role.DECODE)

    @cached_property
    def pairs(self) -> tuple[tuple[Pool, Pool], ...]:
        """Every prefill pool with every decode pool that it can meet. Of pools that differ only in name, hosts,
        port or replicas the first stands for all, so that a file of hundreds of pools is judged quickly."""
        sources, sinks = _distinct(self.prefill), _distinct(self.decode)
        return tuple((p, d) for p in sources for d in sinks)

    @cached_property
    def single_host(self) -> bool:
        """Whether all engines run on one machine."""
        return len(self.topology.hosts) == 1

    @cached_property
    def off_loopback(self) -> bool:
        """Whether an engine is reachable from other machines."""
        return any(not is_loopback(host) for host in self.topology.hosts)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    return host == "localhost" or host.startswith("127.") or host in ("::1", "[::1]")


def _distinct(pools: tuple[Pool, ...]) -> list[Pool]:
    ignored = {"name": "x", "hosts": (), "port": 1, "replicas": 1}
    kept: dict[str, Pool] = {}
    for pool in pools:
        kept.setdefault(repr(pool.spec.model_copy(update=ignored)), pool)
    return list(kept.values())
