"""A Hugging Face `config.json`, already parsed, → ModelFacts.

Field names are those of the published configurations of Llama, Qwen2/3 (dense, MoE, Next), DeepSeek V2/V3/R1,
GLM-4/4.5/5, Kimi K2/Linear, Mistral, Gemma, gpt-oss, Jamba, Nemotron-H, Bamba, Granite, MiniMax and LFM2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.models.facts import DTYPE_BYTES, LayerKind, ModelFacts

Config = Mapping[str, Any]
_STATEFUL_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
_FULL = frozenset({"full_attention", "attention", "global_attention", "global", "full"})
_QUANT_BYTES = {"fp8": 1.0, "ascend": 1.0, "compressed-tensors": 1.0, "awq": 0.5, "gptq": 0.5, "mxfp4": 0.53}


def text_config(config: Config) -> Config:
    """The language model's part of a multimodal configuration, or the configuration itself."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(inner := config.get(key), Mapping) and "num_hidden_layers" in inner:
            return {"architectures": config.get("architectures"), **inner}
    return config


def facts_from_config(raw: Config, source: str, weight_bytes: int | None = None) -> ModelFacts:
    """Read what is there; whatever is missing or of a wrong type becomes None."""
    config = text_config(raw)
    heads = _number(config, "num_attention_heads", "n_head")
    hidden = _number(config, "hidden_size", "n_embd")
    head_dim = _number(config, "head_dim") or (hidden // heads if hidden and heads else None)
    architectures = config.get("architectures") or [""]
    kinds = layer_kinds(config)
    total, expert = parameters(config)
    bytes_each = _weight_bytes_each(raw, config)
    estimated = weight_bytes is None
    if weight_bytes is None and total:
        weight_bytes = round(total * bytes_each)
    experts_share = expert / total if total else 0.0
    chosen = _number(config, "num_experts_per_tok", "moe_topk", "top_k_experts") or 0
    active = 1 - experts_share * (1 - chosen / _experts(config)) if _experts(config) else 1.0
    return ModelFacts(
        source=source,
        architecture=str(architectures[0]),
        layers=_number(config, "num_hidden_layers", "n_layer"),
        attention_heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=_number(config, "vocab_size"),
        kv_lora_rank=_number(config, "kv_lora_rank"),
        rope_head_dim=_number(config, "qk_rope_head_dim") if "kv_lora_rank" in config else None,
        index_head_dim=_number(config, "index_head_dim"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or raw.get("torch_dtype") or "bfloat16"),
        weight_bytes=weight_bytes,
        weight_bytes_estimated=estimated,
        expert_weight_bytes=round(experts_share * weight_bytes) if weight_bytes else 0,
        experts=_experts(config),
        active_weight_bytes=round(active * weight_bytes) if weight_bytes and total else None,
        has_scaled_positions=_scales_positions(config),
        max_position=_number(config, "max_position_embeddings"),
        kinds=kinds,
        sliding_window=_number(config, "sliding_window") if LayerKind.SLIDING in kinds else None,
        nextn_layers=_number(config, "num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
    )


def _scales_positions(config: Config) -> bool:
    """`rope_scaling`, or `rope_parameters` of transformers 5: one mapping, or one per kind of layer."""
    rope = config.get("rope_parameters")
    each = [rope, *rope.values()] if isinstance(rope, dict) else []
    types = {r.get("rope_type", r.get("type")) for r in each if isinstance(r, dict)}
    return bool(config.get("rope_scaling")) or bool(types - {None, "default"})


def _number(config: Config, *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _kv_heads(config: Config, heads: int | None) -> int | None:
    if config.get("multi_query"):
        return 1
    # ChatGLM counts groups; a configuration without the key has as many KV heads as heads.
    return _number(config, "num_key_value_heads", "multi_query_group_num", "num_kv_heads") or heads


def _experts(config: Config) -> int:
    return _number(config, "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts") or 0


def layer_kinds(config: Config) -> tuple[LayerKind, ...]:
    """What each layer remembers; empty when the number of layers is not known."""
    layers = _number(config, "num_hidden_layers", "n_layer")
    if layers is None:
        return ()
    explicit = _explicit_kinds(config, layers)
    if explicit:
        return explicit
    if config.get("model_type") in _STATEFUL_TYPES:
        return (LayerKind.RECURRENT,) * layers
    if period := _number(config, "full_attention_interval", "attn_layer_period"):
        offset = config.get("attn_layer_offset", period - 1)
        return tuple(LayerKind.FULL if i % period == offset else LayerKind.RECURRENT for i in range(layers))
    return _sliding_kinds(config, layers)


def _explicit_kinds(config: Config, layers: int) -> tuple[LayerKind, ...]:
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list) and len(types) == layers:
        return tuple(_kind(str(t)) for t in types)
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        # Nemotron-H: M is Mamba, * attention, - an MLP without memory.
        return tuple(LayerKind.RECURRENT if c == "M" else LayerKind.FULL for c in pattern if c in "M*")
    if isinstance(types := config.get("attn_type_list"), list) and len(types) == layers:
        return tuple(LayerKind.FULL if t else LayerKind.RECURRENT for t in types)
    full: Any = config.get("attn_layer_indices")
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        full = [i - 1 for i in linear["full_attn_layers"]]  # Kimi Linear counts from one
    if isinstance(full, list):
        return tuple(LayerKind.FULL if i in full else LayerKind.RECURRENT for i in range(layers))
    return ()


def _kind(name: str) -> LayerKind:
    if name in _FULL:
        return LayerKind.FULL
    return LayerKind.SLIDING if "sliding" in name or "chunked" in name else LayerKind.RECURRENT


def _sliding_kinds(config: Config, layers: int) -> tuple[LayerKind, ...]:
    window = _number(config, "sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (LayerKind.FULL,) * layers
    if period := _number(config, "sliding_window_pattern"):
        return tuple(LayerKind.SLIDING if (i + 1) % period else LayerKind.FULL for i in range(layers))
    if config.get("use_sliding_window") and (first := _number(config, "max_window_layers")):
        return tuple(LayerKind.FULL if i < first else LayerKind.SLIDING for i in range(layers))
    return (LayerKind.SLIDING,) * layers


def _weight_bytes_each(raw: Config, config: Config) -> float:
    quant = config.get("quantization_config") or raw.get("quantization_config")
    if isinstance(quant, Mapping) and (each := _QUANT_BYTES.get(str(quant.get("quant_method")))):
        return each
    return float(DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2))


def parameters(config: Config) -> tuple[int, int]:
    """Estimated numbers of parameters: all, and those of routed experts. Norms and biases are left out."""
    layers = _number(config, "num_hidden_layers", "n_layer")
    hidden = _number(config, "hidden_size", "n_embd")
    vocab = _number(config, "vocab_size")
    heads = _number(config, "num_attention_heads", "n_head")
    if not (layers and hidden and vocab and heads):
        return 0, 0
    attention = _attention_parameters(config, hidden, heads)
    inner = _number(config, "intermediate_size", "n_inner") or 4 * hidden
    experts = _experts(config)
    dense_layers = layers
    expert = shared = 0
    if experts:
        moe_inner = _number(config, "moe_intermediate_size") or inner
        dense_layers = _number(config, "first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
        moe_layers = layers - dense_layers
        expert = moe_layers * experts * 3 * hidden * moe_inner
        shared_inner = _number(config, "shared_expert_intermediate_size")
        shared_inner = shared_inner or (_number(config, "n_shared_experts") or 0) * moe_inner
        shared = moe_layers * 3 * hidden * shared_inner
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    dense = layers * attention + dense_layers * 3 * hidden * inner + shared + embeddings
    return dense + expert, expert


def _attention_parameters(config: Config, hidden: int, heads: int) -> int:
    head_dim = _number(config, "head_dim") or hidden // heads
    if latent := _number(config, "kv_lora_rank"):
        rope = _number(config, "qk_rope_head_dim") or 64
        nope = _number(config, "qk_nope_head_dim") or 128
        value = _number(config, "v_head_dim") or 128
        q_rank = _number(config, "q_lora_rank")
        query = hidden * heads * (nope + rope) if not q_rank else q_rank * (hidden + heads * (nope + rope))
        return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    kv_heads = _kv_heads(config, heads) or heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads)
