"""The GGUF file becomes a Hugging Face directory: right bytes, whole or not at all."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_pd.embedded import llama_gguf, model
from ascend_pd.errors import OperatorError
from ascend_pd.progress import Progress

gguf = pytest.importorskip("gguf")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 64, 6
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]


def rope_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """A naive reading of llama.cpp's order: row 2i is of a head's first half, row 2i+1 of its second."""
    out = np.empty_like(rows)
    dim = rows.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = rows[head * dim + i]
            out[head * dim + 2 * i + 1] = rows[head * dim + dim // 2 + i]
    return out


def tiny_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, weights in tiny_weights().items():
        if name.endswith("ffn_up.weight"):
            writer.add_tensor(
                name,
                gguf.quantize(weights, gguf.GGMLQuantizationType.Q4_1),
                raw_dtype=gguf.GGMLQuantizationType.Q4_1,
            )
        elif name.endswith("attn_q.weight"):
            writer.add_tensor(name, rope_interleaved(weights, HEADS))
        elif name.endswith("attn_k.weight"):
            writer.add_tensor(name, rope_interleaved(weights, KV_HEADS))
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prepare(source: Path, directory: Path) -> str:
    """What the conversion says while it works; empty when there was nothing to do."""
    said = io.StringIO()
    model.prepare_model(source, directory, Progress("model", said))
    return said.getvalue()


def test_weights_arrive_under_their_names_with_rotary_halves_apart(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out")
    got = safetensors_numpy.load_file(tmp_path / "out" / "model.safetensors")
    wanted = {llama_gguf.hf_name(name): weights for name, weights in tiny_weights().items()}
    assert got.keys() == wanted.keys()
    for name, weights in wanted.items():
        tolerance = 0.3 if name.endswith("up_proj.weight") else 0.0
        np.testing.assert_allclose(got[name], weights, atol=tolerance, err_msg=name)
        assert got[name].dtype == np.float32


def test_config_tokenizer_and_template_come_from_the_metadata(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is True
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == "{{ messages }}" and tokenizer["eos_token"] == "<|im_end|>"
    tokenizers = pytest.importorskip("tokenizers")
    loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert loaded.encode("<|im_start|>abba<|im_end|>").ids == [1, 5, 4, 3, 2]


def test_a_second_run_does_nothing(source: Path, tmp_path: Path) -> None:
    assert "100 %" in prepare(source, tmp_path / "out")
    stamp = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert prepare(source, tmp_path / "out") == ""
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_truncated_directory_is_made_anew(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    assert not model.is_finished(tmp_path / "out")
    prepare(source, tmp_path / "out")
    assert weights.read_bytes() == whole


def test_a_failed_conversion_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "_write_safetensors", disk_full)
    with pytest.raises(OperatorError, match="No space left on device"):
        prepare(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == [".out.lock"]


def test_what_a_killed_run_left_is_removed(source: Path, tmp_path: Path) -> None:
    remains = tmp_path / ".out.partial-killed"
    remains.mkdir()
    (remains / "model.safetensors").write_bytes(b"half")
    prepare(source, tmp_path / "out")
    assert not remains.exists() and model.is_finished(tmp_path / "out", source)


def test_files_of_somebody_else_are_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(OperatorError, match="did not write"):
        prepare(source, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_something_that_is_no_gguf_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, not even nearly")
    with pytest.raises(OperatorError, match="not a GGUF file"):
        prepare(tmp_path / "bad.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_tokenizer_or_architecture_is_refused() -> None:
    with pytest.raises(OperatorError, match="tokenizer"):
        llama_gguf.tokenizer_json({"tokenizer.ggml.model": "llama"})
    with pytest.raises(OperatorError, match="architecture 'qwen2'"):
        llama_gguf.config_json({"general.architecture": "qwen2"}, tied_embeddings=True)
    with pytest.raises(OperatorError, match="not part of a Llama model"):
        llama_gguf.hf_name("blk.0.attn_q.bias")
