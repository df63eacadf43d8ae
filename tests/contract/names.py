"""Everything that ascend-pd uses of packages which only run on an NPU, in one list.

`test_contract.py` checks each line against the released package. When a release changes one, the failing test
names it; the fix is here and in the file named by `used_by`.
"""

from __future__ import annotations

from dataclasses import dataclass

TORCH_NPU = "torch-npu==2.10.0.post4"
VLLM_ASCEND = "vllm-ascend==0.23.0.post1"
MOONCAKE = ("mooncake-transfer-engine-npu==0.3.11.post1", "mooncake-transfer-engine-npu==0.3.13.post1")
"""What vllm-ascend's images ship, and the release that the CPU build used here has the same number as."""
MEMFABRIC = ("memfabric-hybrid==1.2.0", "memfabric-hybrid==1.3.0")
"""What vllm-ascend 0.23.0.post1 requires, and the newest."""


@dataclass(frozen=True)
class Function:
    """A function or method in a Python file, with these parameters in this order (`…` as last one: and more)."""

    release: str
    path: str
    name: str
    parameters: str
    used_by: str


@dataclass(frozen=True)
class Source:
    """A statement or expression somewhere inside a function, class or file (`name` empty), as `ast.unparse` prints
    it."""

    release: str
    path: str
    name: str
    text: str
    used_by: str


@dataclass(frozen=True)
class Binary:
    """A name that a compiled file contains."""

    release: str
    path: str
    name: str
    used_by: str


@dataclass(frozen=True)
class Imported:
    """An attribute of a package that imports on CPU, with these parameters (empty: any)."""

    release: str
    name: str
    parameters: str
    used_by: str


Name = Function | Source | Binary | Imported

NPU, LAYOUT, COMPAT = "connectors/device/npu.py", "connectors/device/kv_layout.py", "connectors/compat"
ENDPOINT, MEMFABRIC_PY = "connectors/transport/endpoint.py", "connectors/transport/memfabric.py"

_UTILS, _STREAMS, _NPU_INIT = "torch_npu/npu/utils.py", "torch_npu/npu/streams.py", "torch_npu/npu/__init__.py"

TORCH: list[Name] = [
    Function(TORCH_NPU, _UTILS, "set_device", "device", NPU),
    Function(TORCH_NPU, _UTILS, "current_device", "", NPU),
    Function(TORCH_NPU, _UTILS, "current_stream", "device", NPU),
    Function(TORCH_NPU, _UTILS, "stream", "stream", NPU),
    Function(TORCH_NPU, _STREAMS, "Stream.__new__", "cls, device, priority, …", NPU),
    Function(TORCH_NPU, _STREAMS, "Event.__new__", "cls, enable_timing, …", NPU),
    Function(TORCH_NPU, _STREAMS, "Event.record", "self, stream", NPU),
    Function(TORCH_NPU, _STREAMS, "Event.wait", "self, stream", NPU),
    Function(TORCH_NPU, _STREAMS, "Event.query", "self", NPU),
    *(
        Source(TORCH_NPU, _NPU_INIT, "", f"'{name}'", NPU)
        for name in ("set_device", "current_device", "current_stream", "stream", "Stream", "Event")
    ),
    Binary(TORCH_NPU, "torch_npu/lib/libtorch_npu.so", "get_npu_format", NPU),
    Source(TORCH_NPU, "torch_npu/npu/_format.py", "Format", "UNDEFINED = -1", NPU),
    Source(TORCH_NPU, "torch_npu/npu/_format.py", "Format", "NCHW = 0", NPU),
    Source(TORCH_NPU, "torch_npu/npu/_format.py", "Format", "ND = 2", NPU),
    Source(TORCH_NPU, "torch_npu/npu/_format.py", "Format", "FRACTAL_NZ = 29", NPU),
]

_RUNNER, _HOOKS = "vllm_ascend/worker/model_runner_v1.py", "vllm_ascend/attention/utils.py"
_REGISTER = "vllm_ascend/distributed/kv_transfer/utils/utils.py"
_ALLOCATE = "NPUModelRunner._allocate_kv_cache_tensors"
_RESHAPE = "NPUModelRunner._reshape_kv_cache_tensors"
_SPEC = "vllm_ascend/core/kv_cache_interface.py"

ASCEND: list[Name] = [
    # Which vLLM, torch and mooncake it belongs to.
    Source(VLLM_ASCEND, _RUNNER, "", "vllm_version_is('0.23.0')", COMPAT),
    # Memory as it reaches register_kv_caches.
    Source(VLLM_ASCEND, _RUNNER, "", "get_kv_transfer_group().register_kv_caches(kv_caches)", LAYOUT),
    Source(VLLM_ASCEND, _RUNNER, _ALLOCATE, "alignment = 2 * 1024 * 1024", NPU),
    Function(VLLM_ASCEND, _RUNNER, "NPUModelRunner._align_memory", "self, tensor, alignment", NPU),
    Source(VLLM_ASCEND, _REGISTER, "", "MAX_HCCL_REGISTER_REGIONS = 256", NPU),
    Source(VLLM_ASCEND, _RUNNER, _RESHAPE, "kv_caches[layer_name] = (k_cache, v_cache)", LAYOUT),
    Source(VLLM_ASCEND, _RUNNER, _RESHAPE, "k_shape = kv_cache_shape[1:]", LAYOUT),
    Source(
        VLLM_ASCEND, _RUNNER, _RESHAPE, "k_shape = (mla_num_blocks, mla_block_size, num_kv_heads, k_dim)", LAYOUT
    ),
    Source(
        VLLM_ASCEND, _RUNNER, _RESHAPE, "v_shape = (mla_num_blocks, mla_block_size, num_kv_heads, v_dim)", LAYOUT
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/attention/attention_v1.py",
        "AscendAttentionBackend.get_kv_cache_shape",
        "return (2, num_blocks, block_size, num_kv_heads, head_size)",
        LAYOUT,
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/attention/mla_v1.py",
        "AscendMLABackend.get_kv_cache_shape",
        "return (num_blocks, block_size, num_kv_heads, head_size)",
        LAYOUT,
    ),
    Source(VLLM_ASCEND, _SPEC, "", "class AscendMLAAttentionSpec(MLAAttentionSpec)", COMPAT),
    Source(VLLM_ASCEND, _SPEC, "", "class AscendSlidingWindowMLASpec(SlidingWindowMLASpec)", COMPAT),
    Source(VLLM_ASCEND, _SPEC, "AscendMLAAttentionSpec", "sparse_head_dim: tuple[int, ...] | None = None", COMPAT),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/ascend_config.py",
        "",
        "self.enable_kv_nz = additional_config.get('enable_kv_nz', False)",
        LAYOUT,
    ),
    # Hooks as they are.
    Function(VLLM_ASCEND, _HOOKS, "maybe_save_kv_layer_to_connector", "layer_name, kv_cache_layer", "connectors"),
    Source(
        VLLM_ASCEND,
        _HOOKS,
        "maybe_save_kv_layer_to_connector",
        "connector.save_kv_layer(layer_name, kv_cache_layer, attn_metadata)",
        "connectors",
    ),
    Source(
        VLLM_ASCEND,
        _HOOKS,
        "wait_for_kv_layer_from_connector",
        "connector.wait_for_layer_load(layer_name)",
        "connectors",
    ),
    Function(VLLM_ASCEND, _HOOKS, "notify_kv_cache_written", "layer_name", "connectors/layerwise"),
    Source(
        VLLM_ASCEND,
        _HOOKS,
        "notify_kv_cache_written",
        "on_kv_cache_written = getattr(connector, 'on_kv_cache_written', None)",
        "connectors/layerwise",
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/attention/attention_v1.py",
        "",
        "notify_kv_cache_written()",
        "connectors/layerwise",
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/attention/mla_v1.py",
        "",
        "notify_kv_cache_written(layer_name)",
        "connectors/layerwise",
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/attention/mla_v1.py",
        "",
        "maybe_save_kv_layer_to_connector(layer_name, list(kv_cache))",
        "connectors/layerwise",
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/ops/gdn.py",
        "",
        "maybe_save_kv_layer_to_connector('', [])",
        "connectors/layerwise",
    ),
    Source(
        VLLM_ASCEND,
        _RUNNER,
        "",
        "self.kv_connector_no_forward(scheduler_output, self.vllm_config)",
        "connectors",
    ),
    Source(
        VLLM_ASCEND,
        _RUNNER,
        "",
        "get_kv_transfer_group().handle_preemptions(kv_connector_metadata)",
        "connectors/layerwise",
    ),
    # It makes the engine id unique itself, once per engine; both sides of the connector see the result.
    Source(
        VLLM_ASCEND,
        "vllm_ascend/platform.py",
        "NPUPlatform.check_and_update_config",
        "vllm_config.kv_transfer_config.engine_id = f'{vllm_config.kv_transfer_config.engine_id}-{uuid4().hex}'",
        "connectors/settings.py",
    ),
    Source(
        VLLM_ASCEND,
        "vllm_ascend/worker/worker.py",
        "NPUWorker.get_kv_connector_handshake_metadata",
        "return {(pp_rank, tp_rank): metadata}",
        "connectors",
    ),
    # The worker's device, which our threads take over.
    Source(VLLM_ASCEND, "vllm_ascend/worker/worker.py", "", "torch.npu.set_device(device)", NPU),
    # Names that ours must win over: a module path does, vLLM's factory asks it first.
    *(
        Source(
            VLLM_ASCEND, "vllm_ascend/distributed/kv_transfer/__init__.py", "register_connector", f"'{name}'", ""
        )
        for name in ("MooncakeConnectorV1", "MooncakeLayerwiseConnector")
    ),
]

MOONCAKE_CALLS = (
    "initialize",
    "get_rpc_port",
    "send_probe",
    "batch_register_memory",
    "batch_transfer_async_read",
    "batch_transfer_async_write",
    "transfer_check_status",
    "batch_transfer_sync_read",
    "batch_transfer_sync_write",
)
ENGINE: list[Name] = [
    Binary(release, "mooncake/engine.so", name, ENDPOINT)
    for release in MOONCAKE
    for name in ("TransferEngine", *MOONCAKE_CALLS)
]

_BUFFERS = "self, dest_session, buffers, peer_buffers, lengths, …"
FABRIC: list[Name] = [
    Imported(release, name, parameters, MEMFABRIC_PY)
    for release in MEMFABRIC
    for name, parameters in (
        (
            "TransferEngine.initialize",
            "self, store_url, session_id, role, device_id, data_op_type, store_server_role, …",
        ),
        ("TransferEngine.get_rpc_port", "self"),
        ("TransferEngine.batch_register_memory", "self, buffer_addrs, capacities"),
        ("TransferEngine.batch_transfer_sync_read", _BUFFERS),
        ("TransferEngine.batch_transfer_sync_write", _BUFFERS),
        ("TransferEngine.destroy", "self"),
        # 1.2.0 has the enumeration inside the class only, 1.3.0 in both places.
        ("TransferEngine.TransDataOpType.SDMA", ""),
        ("TransferEngine.TransDataOpType.DEVICE_RDMA", ""),
        ("create_config_store", ""),
        ("set_conf_store_tls", ""),
        ("set_log_level", ""),
        ("get_last_err_msg", ""),
    )
]

NAMES: list[Name] = [*TORCH, *ASCEND, *ENGINE, *FABRIC]
