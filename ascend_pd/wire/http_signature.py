"""Signatures of the metaserver's requests and replies, by the shared secret that never travels. Pure.

    X-Ascend-PD-Nonce:      32 hex digits, fresh per request
    X-Ascend-PD-Signature:  hex HMAC-SHA256(key, "request" NL method NL target NL nonce NL body), in a reply
                            hex HMAC-SHA256(key, "reply" NL status NL nonce of the request NL body);
                            key = HMAC-SHA256(secret, "ascend-pd metaserver"), target = path with query

A recorded request can be sent again: it is idempotent, so it repeats what has happened. A recorded reply cannot
pass for the reply to another request. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac

NONCE_HEADER = "X-Ascend-PD-Nonce"
SIGNATURE_HEADER = "X-Ascend-PD-Signature"
NONCE_CHARS = 32


class HttpSigner:
    """Signs and verifies for one shared secret; with an empty one signatures are empty and not asked for."""

    def __init__(self, secret: bytes = b"") -> None:
        self._key = hmac.digest(secret, b"ascend-pd metaserver", hashlib.sha256) if secret else b""

    @property
    def authenticated(self) -> bool:
        """Whether signatures are made and demanded."""
        return bool(self._key)

    def request_headers(self, method: str, target: str, nonce: str, body: bytes) -> dict[str, str]:
        """The headers to add to a request; none without a secret."""
        if not self._key:
            return {}
        return {
            NONCE_HEADER: nonce,
            SIGNATURE_HEADER: self._sign("request", method.upper(), target, nonce, body=body),
        }

    def reply_signature(self, status: int, nonce: str, body: bytes) -> str:
        """The signature of a reply to the request with this nonce; empty without a secret."""
        return self._sign("reply", str(status), nonce, body=body) if self._key else ""

    def request_is_genuine(self, method: str, target: str, nonce: str, signature: str, body: bytes) -> bool:
        """Whether the peer that sent this has the secret; always true without one."""
        if not self._key:
            return True
        if len(nonce) != NONCE_CHARS:
            return False
        return _equal(signature, self._sign("request", method.upper(), target, nonce, body=body))

    def reply_is_genuine(self, status: int, nonce: str, signature: str, body: bytes) -> bool:
        """Whether a holder of the secret made this reply to this nonce's request; always true without a secret."""
        return not self._key or _equal(signature, self.reply_signature(status, nonce, body))

    def _sign(self, *fields: str, body: bytes) -> str:
        text = "\n".join(fields).encode("utf-8", "surrogateescape")
        return hmac.new(self._key, text + b"\n" + body, hashlib.sha256).hexdigest()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
