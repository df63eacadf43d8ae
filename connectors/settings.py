"""One frozen settings object per engine process, read once from vLLM's configuration and the secret file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascend_pd.errors import OperatorError
from ascend_pd.secret import load_secret
from ascend_pd.wire.connector_config import ConnectorConfig, parse_connector_config
from ascend_pd.wire.environment import mooncake_environment_problems
from connectors.compat import FEATURES
from connectors.handoff.faults import FAULTS_VARIABLE, FaultInjector, parse_faults
from connectors.handoff.sink import SinkLimits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

SPARE_S = 2.0
"""How long the healthy transfers beside a failed one may still take before its endpoint is destroyed: each that is cut
makes another engine fence."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """What both connectors and both of their sides need to know about this engine."""

    config: ConnectorConfig
    engine_id: str
    side_port: int
    """The side channel of this engine core: `kv_port` + DP rank."""
    is_producer: bool
    is_consumer: bool
    recompute: bool
    """kv_load_failure_policy is `recompute`, not `fail`."""
    tp_size: int
    pp_size: int
    block_size: int
    secret: bytes
    faults: FaultInjector | None = None
    """Faults on purpose; None in earnest."""

    @property
    def fence_spare_s(self) -> float:
        """How long a fence waits for what is healthy beside the transfer that it is for."""
        return min(SPARE_S, self.config.quarantine_seconds / 4)

    @property
    def role(self) -> str:
        """prefill, decode or union."""
        if self.is_producer and self.is_consumer:
            return "union"
        return "prefill" if self.is_producer else "decode"

    def sink_limits(self, *, single_group: bool) -> SinkLimits:
        """D's durations; a model with several KV cache groups cannot be told of a failure before it is safe."""
        return SinkLimits(
            transfer_s=self.config.transfer_seconds,
            quarantine_s=self.config.quarantine_seconds,
            answer_early=single_group and not self.recompute,
        )


def load_settings(vllm_config: VllmConfig) -> ConnectorSettings:
    """Read this engine's settings.

    Raises:
        OperatorError: an unknown or wrong key, an unreadable secret, a parallel layout or a
            scheduling mode that D cannot have.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise OperatorError("no kv_transfer_config", "start the engine with --kv-transfer-config")
    config = parse_connector_config(dict(transfer.kv_connector_extra_config or {}))
    if config.transport == "mooncake" and config.protocol == "tcp":
        for problem in mooncake_environment_problems(os.environ):
            logger.warning("%s (an engine that ascend-pd starts has the right values)", problem)
    parallel = vllm_config.parallel_config
    if transfer.is_kv_consumer and parallel.pipeline_parallel_size > 1:
        raise OperatorError("a decode engine cannot use pipeline parallelism", "set pp: 1 for the decode pool")
    overlapping = bool(vllm_config.scheduler_config.async_scheduling)
    if transfer.is_kv_consumer and overlapping and not FEATURES.defers_block_free:
        raise OperatorError(
            "with async scheduling this vLLM frees blocks that a running step still writes: a cache that decode "
            "receives into them would be damaged",
            "start decode engines with --no-async-scheduling (ascend-pd does), or use vLLM 0.32",
        )
    return ConnectorSettings(
        config=config,
        engine_id=str(transfer.engine_id),
        side_port=int(transfer.kv_port) + int(parallel.data_parallel_index),
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        recompute=transfer.kv_load_failure_policy == "recompute",
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        block_size=vllm_config.cache_config.block_size,
        secret=load_secret(config.secret_file),
        faults=_faults(),
    )


def _faults() -> FaultInjector | None:
    plan = parse_faults(os.environ.get(FAULTS_VARIABLE, ""))
    if not plan:
        return None
    logger.warning("%s: faults are injected on purpose: %s", FAULTS_VARIABLE, plan)
    return FaultInjector(plan)
