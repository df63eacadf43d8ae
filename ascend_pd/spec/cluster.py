"""The cluster file as typed objects. Shapes and single-field limits only: what fields mean together is judged
by `ascend_pd.check`.

In the file keys are camelCase (`kvPort`), here attributes are snake_case (`kv_port`). Everything is frozen and
strict: an unknown key, or a number where text is meant, is an error.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

API_VERSION = "ascend-pd/v1"
KIND = "PDCluster"
EMBEDDED_MODEL = "smollm2"
"""`model.path` of the demo model that `ascend-pd model` prepares; no directory of that name is looked for."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length=63)]
"""A DNS label: it becomes part of engine ids and of Kubernetes object names."""
Host = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[0-9A-Za-z_.:-]+$")]
Port = Annotated[int, Field(ge=1)]
"""No upper limit here: the rule `port-range` judges derived ports and typed ones alike."""
Count = Annotated[int, Field(ge=1, le=4096)]
Number = Annotated[int, Field(ge=1, le=1_000_000_000)]
MAX_DEVICES = 65536
Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Texts = Annotated[tuple[str, ...], Strict(False)]
Hosts = Annotated[tuple[Host, ...], Strict(False)]
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


PolicyName = Literal["least-tokens", "power-of-two", "prefix", "round-robin", "session"]
"""Equal to the proxy's registry; a test compares them."""


class Hardware(StrEnum):
    """A hardware generation. P and D must be of one."""

    A2 = "A2"
    A3 = "A3"
    CPU = "cpu"


class Role(StrEnum):
    """What a pool does: `union` is collocated prefill and decode, also the fallback."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNION = "union"


class Mode(StrEnum):
    """Who moves the cache: D pulls it, or P pushes it layer by layer."""

    PULL = "pull"
    LAYERWISE = "layerwise"


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


LaxHardware = Annotated[Hardware, Strict(False)]
LaxRole = Annotated[Role, Strict(False)]
LaxMode = Annotated[Mode, Strict(False)]


class Metadata(_Strict):
    """The cluster's name."""

    name: Name


class GeometrySpec(_Strict):
    """Model figures for when `config.json` is not at hand; where it is, these win field by field."""

    layers: Count | None = None
    attention_heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Number | None = None
    hidden_size: Number | None = None
    vocab_size: Number | None = None
    weight_bytes: Bytes | None = None
    """Of the checkpoint as loaded (quantised, if it is)."""
    expert_weight_bytes: Bytes | None = None
    """The part of `weight_bytes` that is routed experts: it is divided by tp·dp, the rest by tp."""
    active_weight_bytes: Bytes | None = None
    """The part of `weight_bytes` that one token passes through; only the preflight's sizing reads it."""
    kv_lora_rank: Number | None = None
    """Given for MLA models only."""
    rope_head_dim: Number | None = None


class ModelSpec(_Strict):
    """The model that all pools serve."""

    path: Annotated[str, Field(min_length=1)]
    """A Hugging Face directory, or `smollm2` for the embedded demo model."""
    served_name: Annotated[str, Field(min_length=1)] | None = None
    """Default: the last part of `path`."""
    max_model_len: Number
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"] = "auto"
    geometry: GeometrySpec = GeometrySpec()

    @property
    def public_name(self) -> str:
        """The name clients ask for."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class Versions(_Strict):
    """Versions installed on the nodes or in the image, as far as the operator states them."""

    vllm: str | None = None
    vllm_ascend: str | None = Field(default=None, alias="vllm-ascend")
    cann: str | None = None
    torch_npu: str | None = Field(default=None, alias="torch-npu")
    mooncake: str | None = None
    memfabric: str | None = None
    driver: str | None = None
    firmware: str | None = None


class EngineSpec(_Strict):
    """What all engines share."""

    block_size: Annotated[int, Field(ge=1, le=4096)] = 128
    versions: Versions = Versions()
    extra_args: Texts = ()
    env: Environment = {}


class ConnectorSpec(_Strict):
    """How the KV cache moves. Durations are seconds."""

    mode: LaxMode = Mode.PULL
    transport: Literal["mooncake", "memfabric"] = "mooncake"
    protocol: Literal["ascend", "tcp", "rdma", "device_sdma", "device_rdma"] = "ascend"
    kv_port: Port = 36000
    """First side-channel port of every host; see `ascend_pd.spec.topology`."""
    lease_seconds: Seconds = 30
    max_hold_seconds: Seconds = 600
    """No renewal extends a hold past this."""
    transfer_seconds: Seconds = 60
    """D's deadline from admission to the cache being there."""
    quarantine_seconds: Seconds = 10
    """Bound on waiting for drained acknowledgements before D fences its own endpoint."""
    load_failure_policy: Literal["fail", "recompute"] = "fail"
    staging_bytes: Bytes = 64 << 20
    """Memory per worker and peer in which small pieces travel packed; 0 moves each by itself."""
    checksum: bool = False
    """Compare the bytes on both ends of every transfer, at the price of one more pass over them on each; a difference
    is a failed transfer. For hunting corruption."""
    memfabric_store: str | None = None
    """`tcp://host:port` of MemFabric's configuration store."""
    closed_network: bool = False
    """The operator's word that nobody else reaches the data ports, which no transport authenticates."""
    secret_file: Annotated[str, Field(min_length=1)] | None = None
    """Shared secret of the side channel, the metaserver and the proxy's admin calls to engines."""


class ParallelSpec(_Strict):
    """Parallel sizes of one replica: it takes tp·pp·dp devices."""

    tp: Count = 1
    dp: Count = 1
    pp: Count = 1
    ep: bool = False
    """Expert parallelism over tp·dp."""

    @property
    def world_size(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp * self.dp


class OverridesSpec(_Strict):
    """What one pool may set apart from the rest of the cluster. P and D must still agree."""

    model_path: Annotated[str, Field(min_length=1)] | None = None
    max_model_len: Number | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"] | None = None
    block_size: Annotated[int, Field(ge=1, le=4096)] | None = None


class PoolSpec(_Strict):
    """Replicas of one role with one layout on one kind of hardware."""

    name: Name
    role: LaxRole
    hardware: LaxHardware
    replicas: Count = 1
    parallel: ParallelSpec = ParallelSpec()
    hosts: Hosts = ()
    """Bare metal: the machines of this pool. Empty on CPU means this machine; empty on NPUs means Kubernetes."""
    super_pod: Annotated[str, Field(min_length=1)] | None = None
    port: Port
    """HTTP port of the first engine of this pool on each host; the next engine there has the next port."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_num_batched_tokens: Number | None = None
    overrides: OverridesSpec = OverridesSpec()
    extra_args: Texts = ()
    env: Environment = {}


class MetaserverSpec(_Strict):
    """The rendezvous of layer-wise mode; `host` is the address that engines reach it under."""

    host: Host = "127.0.0.1"
    port: Port = 9000


class PolicySpec(_Strict):
    """Which of the proxy's selection policies choose P and D."""

    prefill: PolicyName = "least-tokens"
    decode: PolicyName = "least-tokens"


class ProxySpec(_Strict):
    """The OpenAI endpoint."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    policy: PolicySpec = PolicySpec()
    admin_host: Host = "127.0.0.1"
    admin_port: Port | None = None
    """Listener of the admin API; none when left out."""
    admin_key_file: Annotated[str, Field(min_length=1)] | None = None
    api_key_file: Annotated[str, Field(min_length=1)] | None = None


class WorkloadSpec(_Strict):
    """What the cluster is meant to carry; only the preflight's arithmetic reads it."""

    prompt_tokens: Number = 4000
    output_tokens: Number = 1000
    requests_per_second: Annotated[float, Field(gt=0)] | None = None


class ClusterSpec(_Strict):
    """The body of the file."""

    model: ModelSpec
    engine: EngineSpec = EngineSpec()
    connector: ConnectorSpec = ConnectorSpec()
    pools: Annotated[tuple[PoolSpec, ...], Strict(False), Field(json_schema_extra={"minItems": 1})]
    metaserver: MetaserverSpec = MetaserverSpec()
    """Started in layer-wise mode only."""
    proxy: ProxySpec = ProxySpec()
    workload: WorkloadSpec = WorkloadSpec()

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        # Not a minimum length of the field: that would also be counted after wrong pools were left out.
        if not self.pools:
            raise PydanticCustomError("pools", "pools is empty")
        devices = sum(pool.replicas * pool.parallel.world_size for pool in self.pools)
        if devices > MAX_DEVICES:
            raise PydanticCustomError("devices", f"pools take {devices} devices in all, {MAX_DEVICES} at most")
        return self

    @property
    def has_metaserver(self) -> bool:
        """Whether this cluster runs a metaserver."""
        return self.connector.mode is Mode.LAYERWISE


class PDCluster(_Strict):
    """One cluster file."""

    api_version: Literal["ascend-pd/v1"]
    kind: Literal["PDCluster"]
    metadata: Metadata
    spec: ClusterSpec
