"""API keys: kept as SHA-256 hashes, compared in constant time.

A key file has one key per line: `name sha256-hex [max_running=N] [requests_per_minute=N]`; `#` begins a comment.
Keys are made by `python -m proxy.auth NAME` (256 random bits, so that a plain hash is enough) and shown once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
from dataclasses import dataclass

from ascend_pd.errors import OperatorError
from proxy.errors import ProxyError
from proxy.settings import KeyLimits

_FIX = "write `name sha256-hex [max_running=N] [requests_per_minute=N]`; `python -m proxy.auth NAME` makes a line"


@dataclass(frozen=True, slots=True)
class Key:
    """One known key."""

    name: str
    digest: bytes
    limits: KeyLimits


def parse_keys(text: str, path: str) -> tuple[Key, ...]:
    """The keys of a key file.

    Raises:
        OperatorError: a line that is none, two keys of one name, or no key at all.
    """
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            key = _parse_line(words)
        except ValueError as error:
            raise OperatorError(f"{path}, line {number}: {error}", _FIX) from error
        if key.name in keys:
            raise OperatorError(f"{path}, line {number}: a second key named {key.name!r}", "name each key once")
        keys[key.name] = key
    if not keys:
        raise OperatorError(f"{path} holds no key", _FIX)
    return tuple(keys.values())


def _parse_line(words: list[str]) -> Key:
    if len(words) < 2:
        raise ValueError("a name and a hash are needed")
    digest = bytes.fromhex(words[1])
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("the hash has not 64 hex digits")
    limits = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in ("max_running", "requests_per_minute") or not value.isdigit():
            raise ValueError(f"{word!r} is no limit")
        limits[name] = int(value)
    return Key(words[0], digest, KeyLimits(**limits))


def bearer(authorization: bytes, api_key: bytes) -> bytes:
    """The key that a client presents, in `Authorization: Bearer …` or `x-api-key` (as /v1/messages clients do)."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else api_key


class Keyring:
    """Answers whose key this is; an empty ring lets everybody in, as nobody in particular."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys

    def check(self, presented: bytes) -> Key | None:
        """The key's entry; None when no keys are configured.

        Raises:
            ProxyError: 401, no or an unknown key.
        """
        if not self._keys:
            return None
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self._keys:  # all of them, so that time tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise ProxyError("a valid API key is needed: Authorization: Bearer KEY", 401, kind="invalid_api_key")
        return found


def main(argv: list[str]) -> int:
    """Make a key: the key itself on standard error, its line for the key file on standard output."""
    if len(argv) != 1 or not argv[0].isprintable() or " " in argv[0]:
        print("usage: python -m proxy.auth NAME >> KEYFILE", file=sys.stderr)
        return 2
    key = "apd-" + secrets.token_urlsafe(32)
    print(f"the key, shown once: {key}", file=sys.stderr)
    print(argv[0], hashlib.sha256(key.encode()).hexdigest())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
