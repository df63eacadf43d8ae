"""What a Llama model in a GGUF file is called and looks like in a Hugging Face directory. Pure.

Facts about the format: the GGUF specification (metadata keys, tensor names) and llama.cpp's converter, which
interleaves the two halves of each rotary head in the rows of Q and K; Hugging Face keeps the halves apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_pd.errors import OperatorError

Metadata = Mapping[str, Any]

CONTROL_TOKEN = 3
"""GGUF's token type of a special token."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    Raises:
        OperatorError: a tensor that a Llama model does not have.
    """
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix == "blk" and layer.isdigit() and kind in _IN_LAYER:
        return f"model.layers.{layer}.{_IN_LAYER[kind]}"
    raise OperatorError(f"GGUF tensor {name!r} is not part of a Llama model")


def rotary_heads(name: str, metadata: Metadata) -> int:
    """How many heads are interleaved in this tensor's rows; 0 when its rows are as Hugging Face has them."""
    if name.endswith(".attn_q.weight"):
        return int(metadata["llama.attention.head_count"])
    if name.endswith(".attn_k.weight"):
        return int(metadata["llama.attention.head_count_kv"])
    return 0


def separate_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the interleaving: row 2i of a head is row i of its first half, row 2i+1 row i of its second.

    Args:
        rows: shape (heads * head_dim, columns).
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _short_float(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def config_json(metadata: Metadata, *, tied_embeddings: bool) -> dict[str, Any]:
    """config.json of the model.

    Raises:
        OperatorError: another architecture, or a key is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise OperatorError(f"the GGUF file has architecture {architecture!r}, only 'llama' can be converted")
    try:
        heads = int(metadata["llama.attention.head_count"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": int(metadata["llama.embedding_length"]),
            "intermediate_size": int(metadata["llama.feed_forward_length"]),
            "num_hidden_layers": int(metadata["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
            "head_dim": int(metadata["llama.embedding_length"]) // heads,
            "max_position_embeddings": int(metadata["llama.context_length"]),
            "rms_norm_eps": _short_float(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _short_float(metadata["llama.rope.freq_base"]),
            "rope_scaling": None,
            "vocab_size": int(metadata["llama.vocab_size"]),
            "tie_word_embeddings": tied_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
            "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
            "torch_dtype": "float32",
        }
    except KeyError as error:
        raise OperatorError(f"the GGUF file lacks the metadata key {error}") from error


def generation_config_json(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: where generation stops."""
    return {
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
    }


def _special_tokens(metadata: Metadata) -> list[tuple[int, str]]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    return [(i, token) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL_TOKEN]


_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """tokenizer.json (Hugging Face `tokenizers`) of a byte-level BPE whose digits stand alone.

    Raises:
        OperatorError: another kind of tokenizer; guessing its pre-tokenizer would tokenize wrongly in silence.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise OperatorError(f"the GGUF file has tokenizer {kind}, only ('gpt2', 'smollm') can be converted")
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    merges: Sequence[str] = metadata["tokenizer.ggml.merges"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **_ADDED} for i, token in _special_tokens(metadata)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def tokenizer_config_json(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json, chat template included."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]

    def token(key: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{key}_token_id"])]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata["llama.context_length"]),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "additional_special_tokens": [text for _, text in _special_tokens(metadata)],
        "chat_template": metadata["tokenizer.chat_template"],
    }
