"""Who is who: transfers, engines and their epochs, and the fingerprint that two engines must share."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np

from ascend_pd.wire import WIRE_VERSION


class EngineRef(msgspec.Struct, frozen=True):
    """One engine core in one life: `epoch` is a nonce made at its start."""

    engine_id: str
    epoch: str

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.epoch[:8]}"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on P and D. What may differ (TP, block size, layout) is judged by the planner."""

    wire_version: int = WIRE_VERSION
    architecture: str
    model_config_hash: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    kv_cache_dtype: str
    hardware: str
    tokenizer_hash: str
    chat_template_hash: str
    speculative: str = ""
    attention_isa: str = ""
    """How the attention kernel packs K inside a block (CPU only, else empty)."""


class FieldMismatch(msgspec.Struct, frozen=True):
    """One field in which two engines differ."""

    field: str
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.field}: prefill has {self.prefill!r}, decode has {self.decode!r}"


def mismatches(prefill: Fingerprint, decode: Fingerprint) -> list[FieldMismatch]:
    """All fields in which the two differ, in declaration order; empty when the engines may be paired."""
    return [
        FieldMismatch(name, str(getattr(prefill, name)), str(getattr(decode, name)))
        for name in Fingerprint.__struct_fields__
        if getattr(prefill, name) != getattr(decode, name)
    ]


def transfer_id_from(random_bytes: bytes) -> str:
    """A transfer id (UUID 4 text) from 16 random bytes."""
    return str(uuid.UUID(bytes=random_bytes, version=4))


def prompt_hash(token_ids: Sequence[int]) -> str:
    """Hash of a prompt's token ids: equal prompts, and only they, are handed off to each other."""
    packed = np.asarray(token_ids, dtype="<u4").tobytes()
    return hashlib.blake2b(packed, digest_size=16).hexdigest()
