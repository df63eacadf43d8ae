"""Bytes of the side channel: one message per frame, authenticated by a shared secret. Pure.

    frame   = magic "APD" · wire version (1 byte) · kind (1 byte) · MAC (32 bytes) · payload
    payload = msgpack map {id, sender, body}; for a notice {reason}
    MAC     = HMAC-SHA256(key, everything but the MAC), key = HMAC-SHA256(secret, "ascend-pd side channel");
              32 zero bytes when no secret is configured

The version stands before anything that may change, so another version is recognised and named, not guessed at.
The kind is under the MAC: a reply cannot pass for a request. A reply repeats the request's id, 16 random bytes
under the MAC: an answer recorded earlier cannot pass for the answer to a new request.

What remains to somebody who records signed requests: he can send them again. Every request is idempotent and names
a transfer and (but for Hello, Ask and a Release without epoch) an epoch, so a second copy changes what a late
duplicate on the network would change: nothing, or one more lease for a hold that is alive, up to its hard maximum.
Nothing is encrypted, and a notice is not signed: it only explains why there will be no answer.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum, StrEnum
from typing import TypeVar

import msgspec

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from ascend_pd.wire import WIRE_VERSION
from ascend_pd.wire.messages import Reply, Request

MAGIC = b"APD"
REQUEST_ID_BYTES = 16
MAC_BYTES = 32
HEADER_BYTES = len(MAGIC) + 2
OVERHEAD_BYTES = HEADER_BYTES + MAC_BYTES
MAX_REQUEST_BYTES = 1 << 20
"""A Stage carries all block ids of a request: some 200 000 fit."""
MAX_REPLY_BYTES = 16 << 20
"""A HelloReply carries the layout of every worker."""
MAX_SENDER_CHARS = 256
_NO_MAC = bytes(MAC_BYTES)


class FrameKind(IntEnum):
    """The fifth byte of a frame."""

    REQUEST = 1
    REPLY = 2
    NOTICE = 3


class Flaw(StrEnum):
    """What is wrong with a frame; also the label under which it is counted."""

    FOREIGN = "foreign"
    """Not a frame of this protocol."""
    VERSION = "foreign_version"
    TOO_LONG = "too_long"
    BAD_MAC = "bad_mac"
    """Signed with another secret, signed by a peer when this side has none, or the other way round."""
    MALFORMED = "malformed"
    """Ours and authentic, but not a message that this side knows."""


class FrameError(RemoteProtocolError):
    """A frame that must be dropped."""

    def __init__(self, flaw: Flaw, message: str) -> None:
        super().__init__(message)
        self.flaw = flaw


class NoticeError(RemoteProtocolError):
    """The peer says that it dropped our frame, and why. Not signed: no more than a lost message, explained."""


class RequestEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request on its way; `sender` is for logs and counters, what counts is in the body."""

    id: bytes
    sender: str
    body: Request


class ReplyEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to the request of the same `id`."""

    id: bytes
    sender: str
    body: Reply


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a frame was dropped."""

    reason: str


Envelope = TypeVar("Envelope", RequestEnvelope, ReplyEnvelope)

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(RequestEnvelope)
_reply_decoder = msgspec.msgpack.Decoder(ReplyEnvelope)
_notice_decoder = msgspec.msgpack.Decoder(Notice)


def message_tag(message: Request | Reply) -> str:
    """The message's name on the wire, e.g. `done`."""
    return str(message.__struct_config__.tag)


class FrameCodec:
    """Turns messages into frames and back, for one shared secret (empty: unauthenticated). Thread-safe."""

    def __init__(self, secret: bytes = b"") -> None:
        self._key = hmac.digest(secret, b"ascend-pd side channel", hashlib.sha256) if secret else b""

    @property
    def authenticated(self) -> bool:
        """Whether frames are signed and signatures demanded."""
        return bool(self._key)

    def encode_request(self, request_id: bytes, sender: str, body: Request) -> bytes:
        """The frame of one request.

        Raises:
            LocalProtocolError: it is longer than a peer would accept, or holds what msgpack cannot say.
        """
        return self._seal(FrameKind.REQUEST, RequestEnvelope(request_id, sender, body), MAX_REQUEST_BYTES)

    def encode_reply(self, request_id: bytes, sender: str, body: Reply) -> bytes:
        """The frame of the answer to the request `request_id`.

        Raises:
            LocalProtocolError: it is longer than a peer would accept, or holds what msgpack cannot say.
        """
        return self._seal(FrameKind.REPLY, ReplyEnvelope(request_id, sender, body), MAX_REPLY_BYTES)

    def decode_request(self, frame: bytes) -> RequestEnvelope:
        """Read a request.

        Raises:
            FrameError: it must be dropped, and why.
        """
        return _checked(self._open(frame, FrameKind.REQUEST, MAX_REQUEST_BYTES), _request_decoder)

    def decode_reply(self, frame: bytes) -> ReplyEnvelope:
        """Read a reply.

        Raises:
            NoticeError: the peer explains why it did not answer.
            FrameError: it must be dropped, and why.
        """
        if _header_of(frame) == FrameKind.NOTICE:
            raise NoticeError(_notice_text(frame))
        return _checked(self._open(frame, FrameKind.REPLY, MAX_REPLY_BYTES), _reply_decoder)

    def _seal(self, kind: FrameKind, envelope: RequestEnvelope | ReplyEnvelope, max_bytes: int) -> bytes:
        header = MAGIC + bytes((WIRE_VERSION, kind))
        try:
            payload = _encoder.encode(envelope)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise LocalProtocolError(f"{message_tag(envelope.body)} cannot be put on the wire: {error}") from error
        length = OVERHEAD_BYTES + len(payload)
        if length > max_bytes:
            raise LocalProtocolError(f"{message_tag(envelope.body)} of {length} bytes, the bound is {max_bytes}")
        return header + self._mac(header, payload) + payload

    def _open(self, frame: bytes, kind: FrameKind, max_bytes: int) -> bytes:
        if len(frame) > max_bytes:
            raise FrameError(Flaw.TOO_LONG, f"frame of {len(frame)} bytes, the bound is {max_bytes}")
        found = _header_of(frame)
        payload = frame[OVERHEAD_BYTES:]
        mac = frame[HEADER_BYTES:OVERHEAD_BYTES]
        if not hmac.compare_digest(mac, self._mac(frame[:HEADER_BYTES], payload)):
            raise FrameError(Flaw.BAD_MAC, self._mac_complaint(mac))
        if found != kind:
            raise FrameError(Flaw.MALFORMED, f"expected a {kind.name.lower()}, got kind {found}")
        return payload

    def _mac(self, header: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, header + payload, hashlib.sha256) if self._key else _NO_MAC

    def _mac_complaint(self, mac: bytes) -> str:
        if not self._key:
            return "the frame is signed, and this side has no secret (connector.secretFile)"
        if mac == _NO_MAC:
            return "the frame is not signed, and this side has a secret (connector.secretFile)"
        return "the frame is signed with another secret (connector.secretFile)"


def encode_notice(reason: str) -> bytes:
    """An unsigned frame that explains why a request was dropped."""
    return MAGIC + bytes((WIRE_VERSION, FrameKind.NOTICE)) + _NO_MAC + _encoder.encode(Notice(reason[:512]))


def _header_of(frame: bytes) -> int:
    if len(frame) < OVERHEAD_BYTES or frame[: len(MAGIC)] != MAGIC:
        raise FrameError(Flaw.FOREIGN, "not a frame of ascend-pd's side channel")
    version = frame[len(MAGIC)]
    if version != WIRE_VERSION:
        raise FrameError(Flaw.VERSION, f"the peer speaks wire version {version}, this side {WIRE_VERSION}")
    return frame[len(MAGIC) + 1]


def _checked(payload: bytes, decoder: msgspec.msgpack.Decoder[Envelope]) -> Envelope:
    try:
        envelope = decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(Flaw.MALFORMED, f"malformed message: {error}") from error
    if len(envelope.id) != REQUEST_ID_BYTES:
        raise FrameError(Flaw.MALFORMED, f"id of {len(envelope.id)} bytes, expected {REQUEST_ID_BYTES}")
    if len(envelope.sender) > MAX_SENDER_CHARS:
        raise FrameError(
            Flaw.MALFORMED, f"sender of {len(envelope.sender)} characters, at most {MAX_SENDER_CHARS}"
        )
    return envelope


def _notice_text(frame: bytes) -> str:
    try:
        return f"the peer dropped our message: {_notice_decoder.decode(frame[OVERHEAD_BYTES:]).reason[:512]!r}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(Flaw.MALFORMED, f"malformed notice: {error}") from error
