"""The shared secret that the side channel and the metaserver authenticate by: read from a file, never logged."""

from __future__ import annotations

from pathlib import Path

from ascend_pd.errors import OperatorError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
_FIX = "write one with `head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE` and give every process the same"


def load_secret(path: str) -> bytes:
    """The secret in `path` without surrounding white space; empty when `path` is empty (no authentication).

    Raises:
        OperatorError: no such file, unreadable, or a secret too short or too long to be one.
    """
    if not path:
        return b""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 2).strip()
    except OSError as error:
        raise OperatorError(f"secret file {path}: {error.strerror or error}", _FIX) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise OperatorError(
            f"secret file {path}: {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed", _FIX
        )
    if len(secret) > MAX_SECRET_BYTES:
        raise OperatorError(f"secret file {path}: longer than {MAX_SECRET_BYTES} bytes", _FIX)
    return secret
