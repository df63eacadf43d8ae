"""This engine's fingerprint, from vLLM's configuration and the files of the model directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_pd.wire.identity import Fingerprint
from connectors.compat import cache_groups, cpu_attention_isa

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "added_tokens.json",
    "special_tokens_map.json",
)
_MODEL_FILES = ("config.json", "params.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# Written by tools, without influence on what the model computes.
_VOLATILE_KEYS = {"transformers_version", "_name_or_path", "name_or_path", "_commit_hash"}
_SAMPLE_BYTES = 1 << 16


def _digest(parts: Iterable[bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=12)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _stable(v) for k, v in sorted(value.items(), key=str) if k not in _VOLATILE_KEYS}
    if isinstance(value, list | tuple):
        return [_stable(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _model_config(model: ModelConfig) -> bytes:
    """What the model's files say and vLLM was told to override.

    Not `hf_config`: models change it as they are built (DeepSeek renames its rotary embedding), so that it differs
    between an engine's processes.
    """
    directory = Path(str(model.hf_config_path or model.model))
    if directory.is_dir():
        raw = [json.loads((directory / f).read_bytes()) for f in _MODEL_FILES if (directory / f).is_file()]
    else:
        raw = [str(directory), str(model.revision)]  # a hub's name for it
    overrides = model.hf_overrides
    told = getattr(overrides, "__qualname__", "") if callable(overrides) else overrides
    return json.dumps(_stable([raw, told]), sort_keys=True).encode()


def _sample(path: Path) -> bytes:
    """Size and three samples of a weight file: two fine-tunes share a config.json, but not these."""
    size = path.stat().st_size
    with path.open("rb") as file:
        samples = []
        for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            samples.append(file.read(_SAMPLE_BYTES))
    return size.to_bytes(8, "little") + b"".join(samples)


def weights_digest(directory: Path) -> bytes:
    """A quick digest of the weight files in `directory`; empty when it holds none."""
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])
    return _digest(part for f in files for part in (f.name.encode(), _sample(f))).encode() if files else b""


def files_digest(directory: Path, names: Iterable[str]) -> str:
    """Digest of the named files that exist in `directory`; empty when none does."""
    present = [directory / name for name in names if (directory / name).is_file()]
    return _digest(part for f in present for part in (f.name.encode(), f.read_bytes())) if present else ""


def _template_digest(directory: Path) -> str:
    files = files_digest(directory, _TEMPLATE_FILES)
    config = directory / "tokenizer_config.json"
    template = json.loads(config.read_bytes()).get("chat_template") if config.is_file() else None
    if template is None:
        return files
    return _digest([files.encode(), json.dumps(template, sort_keys=True).encode()])


def _plain_dtype(vllm_config: VllmConfig) -> str:
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype


def _speculation(speculative: Any) -> str:
    """Method and draft: their layers have a cache that prefill has to fill. Not the number of tokens: prefill needs
    one, decode may guess more."""
    if speculative is None:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    return f"{speculative.method}:{','.join(draft.hf_config.architectures or ()) if draft else ''}"


def fingerprint_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hardware: str) -> Fingerprint:
    """Everything that must be equal on both ends of a handoff."""
    model = vllm_config.model_config
    directory = Path(model.model)
    tokenizer = Path(str(model.tokenizer))
    weights = weights_digest(directory) if directory.is_dir() else b""
    packing = cpu_attention_isa(vllm_config, cache_groups(kv_cache_config)[0].spec) if hardware == "cpu" else ""
    return Fingerprint(
        architecture=",".join(model.hf_config.architectures or ()),
        model_config_hash=_digest([_model_config(model), weights, str(model.quantization).encode()]),
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        kv_cache_dtype=_plain_dtype(vllm_config),
        hardware=hardware,
        tokenizer_hash=files_digest(tokenizer, _TOKENIZER_FILES) if tokenizer.is_dir() else str(model.tokenizer),
        chat_template_hash=_template_digest(tokenizer) if tokenizer.is_dir() else "",
        speculative=_speculation(vllm_config.speculative_config),
        attention_isa=packing,
    )
