"""vLLM's real scheduler and a real connector in it; the model is pretended. The same code for every series."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
BLOCK = 32
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def engine_config(
    directory: Path,
    connector: str,
    module: str,
    *,
    role: str,
    policy: str = "fail",
    extra: dict[str, Any] | None = None,
    kv_port: int = 14579,
) -> VllmConfig:
    """An engine's configuration for a model that is only a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    model = ModelConfig(
        model=str(directory),
        tokenizer=str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=128,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_port=kv_port,
            kv_connector_extra_config=extra or {},
        ),
    )


def cache_config(num_blocks: int = 24, mla: bool = False) -> KVCacheConfig:
    """One group of two layers; the connector gets the same object as the scheduler."""
    spec: FullAttentionSpec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    if mla:
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=48, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)]
    )


class Rig:
    """One engine core without a model: `step` schedules, pretends to compute, and hands in what workers report."""

    def __init__(self, config: VllmConfig, num_blocks: int = 24, mla: bool = False) -> None:
        self.config = config
        config.cache_config.num_gpu_blocks = num_blocks
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=cache_config(num_blocks, mla),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=False,
            )
        init_none_hash(_hash)
        self.outputs: list[Any] = []

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        request_id: str,
        num_tokens: int,
        params: dict[str, Any] | None = None,
        max_tokens: int = 1,
        prompt_of: str = "",
    ) -> Request:
        """Add a request whose tokens depend on its id, or on `prompt_of`."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
        )
        sampling.update_from_generation_config({}, 2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt(prompt_of or request_id, num_tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, _hash),
        )
        self.scheduler.add_request(request)
        return request

    def step(self, **reported: Any) -> Any:
        """One engine step.

        Args:
            reported: fields of `KVConnectorOutput`, as the workers' aggregated output would have them.
        """
        scheduled = self.scheduler.schedule()
        self.finish_step(scheduled, KVConnectorOutput(**reported))
        return scheduled

    def finish_step(self, scheduled: Any, reported: KVConnectorOutput | None) -> None:
        """Hand in what the step computed: one token for each request whose prompt is complete."""
        ids = list(scheduled.num_scheduled_tokens)
        # num_computed_tokens has been advanced already.
        complete = [
            self.scheduler.requests[r].num_computed_tokens >= self.scheduler.requests[r].num_tokens for r in ids
        ]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[[42] if done else [] for done in complete],
            kv_connector_output=reported,
        )
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            self.outputs.extend(outputs.outputs)

    def finished(self) -> dict[str, Any]:
        """Outputs that ended a request, by request id."""
        return {output.request_id: output for output in self.outputs if output.finish_reason is not None}


def prompt(name: str, num_tokens: int) -> list[int]:
    """Token ids that differ from those of another name, and from one position to the next."""
    start = sum(ord(c) * 31**i for i, c in enumerate(name))
    return [3 + (start + i) % 900 for i in range(num_tokens)]


def _hash(value: Any) -> bytes:
    import hashlib
    import pickle

    return hashlib.sha256(pickle.dumps(value)).digest()
