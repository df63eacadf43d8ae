"""A small KV cache as vLLM's CPU engine lays it out, and what a connector needs around it, without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.request import RequestStatus

from ascend_pd.layout.description import KVLayout
from ascend_pd.wire.connector_config import ConnectorConfig
from ascend_pd.wire.identity import Fingerprint
from ascend_pd.wire.messages import WorkerInfo
from connectors.device import create_device
from connectors.device.base import Device
from connectors.device.kv_layout import CacheGroup, Placement, describe
from connectors.handoff.faults import FaultInjector, parse_faults
from connectors.settings import ConnectorSettings
from connectors.transport import Placement as EndpointPlacement
from connectors.transport import create
from connectors.transport.base import Transport
from connectors.transport.faulty import FaultyTransport

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 4, 24, 2, 32, 16
FINGERPRINT = Fingerprint(
    architecture="Toy",
    model_config_hash="1",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_size=HEAD_SIZE,
    kv_cache_dtype="float32",
    hardware="cpu",
    tokenizer_hash="t",
    chat_template_hash="c",
    attention_isa="vec",
)


def settings(
    role: str, port: int = 0, *, faults: str = "", recompute: bool = False, **config: Any
) -> ConnectorSettings:
    """An engine's settings; `role` is prefill or decode."""
    bounds = {"transfer_seconds": 8.0, "quarantine_seconds": 3.0, "lease_seconds": 5.0}
    plan = parse_faults(faults)
    return ConnectorSettings(
        config=ConnectorConfig(**(bounds | config)),
        engine_id=role,
        side_port=port,
        is_producer=role == "prefill",
        is_consumer=role == "decode",
        recompute=recompute,
        tp_size=1,
        pp_size=1,
        block_size=BLOCK_SIZE,
        secret=b"",
        faults=FaultInjector(plan) if plan else None,
    )


@dataclass
class Cache:
    """One worker's cache, registered with a transport."""

    tensor: torch.Tensor
    """`[layers, blocks, heads, block size, 2 * head size]`, float32, one storage."""
    layout: KVLayout
    device: Device
    transport: Transport

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            tp_rank=0, pp_rank=0, transport=self.transport.name, session=self.transport.session, layout=self.layout
        )


def make_content(seed: int | None) -> torch.Tensor:
    """A cache's bytes: random for a seed, else zeros."""
    shape = (LAYERS, BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    return (
        torch.zeros(shape) if seed is None else torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    )


def make_cache(seed: int | None, faults: FaultInjector | None = None) -> Cache:
    """A cache of `make_content`, and an open transport that the caller closes."""
    tensor = make_content(seed)
    caches = {f"model.layers.{i}.self_attn.attn": tensor[i] for i in range(LAYERS)}
    placement = Placement(num_blocks=BLOCKS, num_kv_heads=HEADS, packed="vec")
    layout = describe(caches, placement, [CacheGroup(layer_names=tuple(caches), block_size=BLOCK_SIZE)])
    device = create_device("cpu")
    transport: Transport = create(ConnectorConfig(), EndpointPlacement("prefill", device.index))
    if faults is not None:
        transport = FaultyTransport(transport, faults)
    transport.register(device.adopt(caches.values()))
    return Cache(tensor, layout, device, transport)


def engine_request(request_id: str, prompt: list[int], params: dict[str, Any], **fields: Any) -> Any:
    """What of vLLM's Request the connectors read."""
    base = {
        "request_id": request_id,
        "kv_transfer_params": params,
        "prompt_token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "num_computed_tokens": len(prompt),
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
    }
    return SimpleNamespace(**(base | fields))
