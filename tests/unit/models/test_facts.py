"""Figures of published configurations, read from their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_pd.models.config_json import facts_from_config, layer_kinds
from ascend_pd.models.facts import LayerKind, with_geometry
from ascend_pd.models.load import load_facts
from ascend_pd.spec.cluster import GeometrySpec

Config = dict[str, Any]
F, S, R = LayerKind.FULL, LayerKind.SLIDING, LayerKind.RECURRENT

LLAMA_31_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
QWEN3_235B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GLM_45_AIR: Config = {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 151552,
    "torch_dtype": "bfloat16",
}
KIMI_K2: Config = {
    **DEEPSEEK_V3,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize(
    ("config", "parameters_b", "active_b"),
    [
        (LLAMA_31_8B, 8.03, 8.03),
        (QWEN3_235B, 235.1, 22.2),
        (DEEPSEEK_V3, 671.0, 37.6),
        (GLM_45_AIR, 106.9, 13.4),
        (KIMI_K2, 1026.0, 32.9),
    ],
    ids=["llama", "qwen3-moe", "deepseek", "glm", "kimi"],
)
def test_parameters_come_within_a_few_percent_of_the_published_number(
    config: Config, parameters_b: float, active_b: float
) -> None:
    facts = facts_from_config(config, "x")
    each = 1 if "quantization_config" in config else 2
    assert facts.weight_bytes is not None
    assert facts.active_weight_bytes is not None
    assert facts.weight_bytes / each / 1e9 == pytest.approx(parameters_b, rel=0.03)
    assert facts.active_weight_bytes / each / 1e9 == pytest.approx(active_b, rel=0.05)
    assert facts.missing() == ()


def test_gqa_caches_two_vectors_per_kv_head_and_layer() -> None:
    facts = facts_from_config(LLAMA_31_8B, "x")
    assert facts.head_dim == 128
    assert facts.kv_bytes_per_token(2) == 2 * 8 * 128 * 32 * 2 == 131072
    assert facts.kv_bytes_per_token_and_rank(8, 1, 2) == 131072 / 8
    assert facts.kv_bytes_per_token_and_rank(16, 1, 2) == 131072 / 8, "heads are repeated, not halved"


def test_mla_caches_one_latent_on_every_rank() -> None:
    facts = facts_from_config(DEEPSEEK_V3, "x")
    assert facts.mla
    assert facts.kv_bytes_per_token(2) == (512 + 64) * 61 * 2
    assert facts.kv_bytes_per_token_and_rank(8, 1, 2) == (512 + 64) * 61 * 2
    sparse = facts_from_config({**DEEPSEEK_V3, "index_head_dim": 128}, "x")
    assert sparse.kv_bytes_per_token(2) == (512 + 64 + 128) * 61 * 2


def test_experts_are_divided_by_dp_and_the_rest_is_not() -> None:
    facts = facts_from_config(QWEN3_235B, "x")
    one, many = facts.weight_bytes_per_rank(8, 1, 1), facts.weight_bytes_per_rank(8, 1, 4)
    assert one is not None
    assert many is not None
    dense = (facts.weight_bytes or 0) - facts.expert_weight_bytes
    assert many == pytest.approx(dense / 8 + facts.expert_weight_bytes / 32)
    assert one == pytest.approx((facts.weight_bytes or 0) / 8)


def test_a_multimodal_configuration_is_read_from_its_language_model() -> None:
    facts = facts_from_config({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": KIMI_K2}, "x")
    assert facts.layers == 61
    assert facts.mla


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"num_hidden_layers": 2}, (F, F)),
        ({}, ()),
        ({"num_hidden_layers": 2, "sliding_window": 4096}, (S, S)),
        ({"num_hidden_layers": 2, "sliding_window": 4096, "use_sliding_window": False}, (F, F)),
        (
            {"num_hidden_layers": 3, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
            (F, F, S),
        ),
        ({"num_hidden_layers": 6, "sliding_window": 512, "sliding_window_pattern": 3}, (S, S, F, S, S, F)),
        ({"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, (S, F)),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, (R, F)),
        ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, (R, F)),
        ({"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"]}, (R, F)),
        ({"num_hidden_layers": 4, "full_attention_interval": 4}, (R, R, R, F)),
        ({"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1}, (R, F, R, R)),
        ({"num_hidden_layers": 4, "hybrid_override_pattern": "M-M*"}, (R, R, F)),
        ({"num_hidden_layers": 3, "attn_type_list": [0, 0, 1]}, (R, R, F)),
        ({"num_hidden_layers": 3, "attn_layer_indices": [1]}, (R, F, R)),
        ({"num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [3]}}, (R, R, F)),
        ({"num_hidden_layers": 2, "model_type": "mamba2"}, (R, R)),
    ],
)
def test_what_each_layer_remembers(config: Config, kinds: tuple[LayerKind, ...]) -> None:
    assert layer_kinds(config) == kinds


def test_recurrent_layers_take_no_cache_per_token() -> None:
    facts = facts_from_config({**LLAMA_31_8B, "full_attention_interval": 4}, "x")
    assert facts.recurrent
    assert facts.cached_layers == 8
    assert facts.kv_bytes_per_token(2) == 131072 // 4


@pytest.mark.parametrize("junk", [{}, {"num_hidden_layers": "many"}, {"architectures": None}, {"layer_types": 3}])
def test_junk_becomes_unknown_and_never_an_exception(junk: Config) -> None:
    assert facts_from_config(junk, "x").missing()


def test_a_directory_gives_the_index_total_and_geometry_wins_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_235B))
    index = {"metadata": {"total_size": 240_000_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = load_facts(str(tmp_path), GeometrySpec(kv_heads=8))
    assert (facts.weight_bytes, facts.kv_heads, facts.layers) == (240_000_000_000, 8, 94)
    assert facts.expert_weight_bytes / facts.weight_bytes == pytest.approx(0.966, abs=0.001)
    assert not facts.weight_bytes_estimated
    assert facts.source == "config.json and model.geometry"


def test_without_an_index_the_files_are_summed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    (tmp_path / "a.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 5)
    assert load_facts(str(tmp_path), GeometrySpec()).weight_bytes == 15


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", "[" * 100_000])
def test_an_unreadable_config_leaves_the_geometry_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    facts = load_facts(str(tmp_path), GeometrySpec(layers=3))
    assert (facts.layers, facts.source) == (3, "model.geometry")


def test_another_number_of_layers_forgets_their_kinds() -> None:
    facts = with_geometry(facts_from_config(LLAMA_31_8B, "x"), GeometrySpec(layers=4))
    assert (facts.kinds, facts.cached_layers) == ((), 4)
