"""What a model needs: layers, heads, bytes per token, weights. Pure figures, wherever they come from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

from ascend_pd.spec.cluster import GeometrySpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


class LayerKind(StrEnum):
    """What a layer remembers of the past."""

    FULL = "full"
    SLIDING = "sliding"
    RECURRENT = "recurrent"
    """Mamba, gated delta net, short convolution, linear attention: a state, not a cache per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Figures of one model; None means not known. `kinds` is one entry per layer, empty when not known."""

    source: str
    """Where the figures come from, for messages."""
    architecture: str = ""
    layers: int | None = None
    attention_heads: int | None = None
    kv_heads: int | None = None
    """Of the whole model; for MLA what the config says, which does not matter: every rank holds the latent."""
    head_dim: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    kv_lora_rank: int | None = None
    rope_head_dim: int | None = None
    index_head_dim: int | None = None
    """Sparse attention (DSA): the indexer's key, cached per token and layer besides the latent."""
    dtype: str = "bfloat16"
    weight_bytes: int | None = None
    weight_bytes_estimated: bool = False
    expert_weight_bytes: int = 0
    experts: int = 0
    active_weight_bytes: int | None = None
    """The part of the weights that one token passes through; None means all of them, or not known with experts."""
    has_scaled_positions: bool | None = None
    """Whether the configuration stretches positions (YaRN and the like) past `max_position`."""
    max_position: int | None = None
    kinds: tuple[LayerKind, ...] = ()
    sliding_window: int | None = None
    nextn_layers: int = 0
    """Multi-token-prediction layers shipped with the model."""

    @property
    def mla(self) -> bool:
        """Whether attention caches one compressed latent per token."""
        return self.kv_lora_rank is not None

    @property
    def num_groups(self) -> int:
        """KV cache groups that vLLM's hybrid manager would make; 1 when not known."""
        return max(1, len(set(self.kinds)))

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry a state."""
        return LayerKind.RECURRENT in self.kinds

    @property
    def cached_layers(self) -> int | None:
        """Layers that cache something per token."""
        if self.layers is None or not self.kinds:
            return self.layers
        return sum(kind is not LayerKind.RECURRENT for kind in self.kinds)

    def missing(self) -> tuple[str, ...]:
        """File keys of the figures that the rules need and do not have."""
        needed = {"layers": self.layers, "attentionHeads": self.attention_heads, "weightBytes": self.weight_bytes}
        if self.mla:
            needed["ropeHeadDim"] = self.rope_head_dim
        else:
            needed |= {"kvHeads": self.kv_heads, "headDim": self.head_dim}
        return tuple(key for key, value in needed.items() if value is None)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int | None:
        """Bytes of the whole model's cache per token, each head counted once."""
        per_layer = self._layer_token_bytes(dtype_bytes, self.kv_heads or 0)
        return per_layer * self.cached_layers if per_layer and self.cached_layers else None

    def kv_bytes_per_token_and_rank(self, tp: int, pp: int, dtype_bytes: int) -> float | None:
        """Bytes that one device caches per token: heads are split over tp, and repeated where there are fewer."""
        heads = -(-(self.kv_heads or 0) // tp)
        per_layer = self._layer_token_bytes(dtype_bytes, heads)
        return per_layer * self.cached_layers / pp if per_layer and self.cached_layers else None

    def _layer_token_bytes(self, dtype_bytes: int, heads: int) -> int | None:
        if self.kv_lora_rank is not None:
            if self.rope_head_dim is None:
                return None
            return (self.kv_lora_rank + self.rope_head_dim + (self.index_head_dim or 0)) * dtype_bytes
        if not heads or self.head_dim is None:
            return None
        return 2 * heads * self.head_dim * dtype_bytes

    def weight_bytes_per_rank(self, tp: int, pp: int, dp: int) -> float | None:
        """Bytes of weights on one device: routed experts are divided by tp·dp, the rest by tp, all by pp."""
        if self.weight_bytes is None:
            return None
        dense = self.weight_bytes - self.expert_weight_bytes
        return (dense / tp + self.expert_weight_bytes / (tp * dp)) / pp


SMOLLM2 = ModelFacts(
    source="the embedded demo model",
    architecture="LlamaForCausalLM",
    layers=30,
    attention_heads=9,
    kv_heads=3,
    head_dim=64,
    hidden_size=576,
    vocab_size=49152,
    dtype="float32",
    weight_bytes=538_060_032,
    max_position=8192,
    kinds=(LayerKind.FULL,) * 30,
)
"""SmolLM2-135M-Instruct as `ascend-pd model` prepares it (float32)."""


def with_geometry(facts: ModelFacts | None, geometry: GeometrySpec) -> ModelFacts:
    """`facts` with the operator's figures laid over it; alone when there is no config.json."""
    known = {f.name for f in fields(ModelFacts)}
    given = {k: v for k, v in geometry.model_dump(exclude_none=True).items() if k in known}
    if facts is None:
        return ModelFacts(source="model.geometry", **given)
    if "weight_bytes" in given:
        given["weight_bytes_estimated"] = False
        if "expert_weight_bytes" not in given and facts.weight_bytes:
            given["expert_weight_bytes"] = round(
                facts.expert_weight_bytes * given["weight_bytes"] / facts.weight_bytes
            )
    if given.get("layers", facts.layers) != facts.layers:
        given["kinds"] = ()
    source = f"{facts.source} and model.geometry" if given else facts.source
    return replace(facts, source=source, **given)
