from __future__ import annotations

import json
import typing

import msgspec
import pytest

from ascend_pd.errors import LocalProtocolError, OperatorError, RemoteProtocolError
from ascend_pd.secret import load_secret
from ascend_pd.wire import WIRE_VERSION, messages
from ascend_pd.wire.frames import (
    HEADER_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    OVERHEAD_BYTES,
    Flaw,
    FrameCodec,
    FrameError,
    NoticeError,
    encode_notice,
    message_tag,
)
from ascend_pd.wire.messages import Ask, Release
from tests.unit.frame_samples import GOLDEN, REPLIES, REQUEST_ID, REQUESTS, SECRET, golden_frames

CODECS = pytest.mark.parametrize("codec", [FrameCodec(SECRET), FrameCodec()], ids=["signed", "unsigned"])


def flaw_of(codec: FrameCodec, frame: bytes) -> Flaw:
    with pytest.raises(FrameError) as caught:
        codec.decode_request(frame)
    return caught.value.flaw


@CODECS
@pytest.mark.parametrize("message", REQUESTS, ids=message_tag)
def test_a_request_comes_back_as_it_was_sent(codec: FrameCodec, message: messages.Request) -> None:
    envelope = codec.decode_request(codec.encode_request(REQUEST_ID, "d0@1", message))
    assert (envelope.id, envelope.sender, envelope.body) == (REQUEST_ID, "d0@1", message)


@CODECS
@pytest.mark.parametrize("message", REPLIES, ids=message_tag)
def test_a_reply_comes_back_as_it_was_sent(codec: FrameCodec, message: messages.Reply) -> None:
    envelope = codec.decode_reply(codec.encode_reply(REQUEST_ID, "p0@1", message))
    assert (envelope.id, envelope.sender, envelope.body) == (REQUEST_ID, "p0@1", message)


def test_every_message_type_has_a_sample() -> None:
    assert {type(m) for m in REQUESTS} == set(typing.get_args(messages.Request))
    assert {type(m) for m in REPLIES} == set(typing.get_args(messages.Reply))


def test_the_bytes_of_this_wire_version_do_not_change() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden_frames() == golden, (
        "the bytes on the wire changed: a released WIRE_VERSION must be raised; before the first release "
        "run `python -m tests.unit.frame_samples`"
    )


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text(encoding="utf-8")))
def test_golden_frames_are_understood(name: str) -> None:
    frame = bytes.fromhex(json.loads(GOLDEN.read_text(encoding="utf-8"))[name])
    tag, _, label = name.partition(" ")
    codec = FrameCodec(SECRET if label == "signed" else b"")
    is_reply = tag in {message_tag(m) for m in REPLIES}
    body = (codec.decode_reply(frame) if is_reply else codec.decode_request(frame)).body
    assert body in (REPLIES if is_reply else REQUESTS)


@pytest.mark.parametrize("index", range(OVERHEAD_BYTES + 40))
def test_a_flipped_bit_anywhere_is_refused(index: int) -> None:
    codec = FrameCodec(SECRET)
    frame = bytearray(codec.encode_request(REQUEST_ID, "d0@1", Ask(transfer_id="t" * 40)))
    frame[index] ^= 0x04
    expected = {0: Flaw.FOREIGN, 1: Flaw.FOREIGN, 2: Flaw.FOREIGN, 3: Flaw.VERSION}.get(index, Flaw.BAD_MAC)
    assert flaw_of(codec, bytes(frame)) == expected


def test_another_secret_is_refused() -> None:
    frame = FrameCodec(b"another secret").encode_request(REQUEST_ID, "d0@1", Ask(transfer_id="t"))
    assert flaw_of(FrameCodec(SECRET), frame) == Flaw.BAD_MAC


def test_an_unsigned_frame_is_refused_where_there_is_a_secret() -> None:
    frame = FrameCodec().encode_request(REQUEST_ID, "d0@1", Ask(transfer_id="t"))
    with pytest.raises(FrameError, match="not signed"):
        FrameCodec(SECRET).decode_request(frame)


def test_a_signed_frame_is_refused_where_there_is_no_secret() -> None:
    frame = FrameCodec(SECRET).encode_request(REQUEST_ID, "d0@1", Ask(transfer_id="t"))
    with pytest.raises(FrameError, match="has no secret"):
        FrameCodec().decode_request(frame)


def test_another_wire_version_is_named() -> None:
    frame = bytearray(FrameCodec().encode_request(REQUEST_ID, "d0@1", Ask(transfer_id="t")))
    frame[3] = WIRE_VERSION + 1
    with pytest.raises(FrameError, match=f"version {WIRE_VERSION + 1}, this side {WIRE_VERSION}"):
        FrameCodec(SECRET).decode_request(bytes(frame))


@CODECS
def test_a_reply_cannot_pass_for_a_request_nor_a_request_for_a_reply(codec: FrameCodec) -> None:
    assert flaw_of(codec, codec.encode_reply(REQUEST_ID, "p0@1", REPLIES[1])) == Flaw.MALFORMED
    with pytest.raises(FrameError, match="expected a reply"):
        codec.decode_reply(codec.encode_request(REQUEST_ID, "p0@1", REQUESTS[0]))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"A",
        b"GET / HTTP/1.1\r\n\r\n",
        b"APD",
        b"APD\x01\x01",
        bytes(OVERHEAD_BYTES),
        b"APD\x01\x01" + bytes(31),
    ],
)
def test_foreign_bytes_are_refused(frame: bytes) -> None:
    assert flaw_of(FrameCodec(), frame) == Flaw.FOREIGN


def unsigned(payload: bytes) -> bytes:
    return b"APD" + bytes((WIRE_VERSION, 1)) + bytes(32) + payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"id": REQUEST_ID, "sender": "x"}),
        msgspec.msgpack.encode({"id": REQUEST_ID, "sender": "x", "body": {"type": "invented"}}),
        msgspec.msgpack.encode({"id": REQUEST_ID, "sender": "x", "body": {"type": "ask", "transfer_id": 7}}),
        msgspec.msgpack.encode(
            {"id": REQUEST_ID, "sender": "x", "body": {"type": "ask", "transfer_id": "t", "y": 1}}
        ),
        msgspec.msgpack.encode(
            {"id": REQUEST_ID, "sender": "x", "body": {"type": "ask", "transfer_id": "t"}, "y": 1}
        ),
        msgspec.msgpack.encode({"id": b"short", "sender": "x", "body": {"type": "ask", "transfer_id": "t"}}),
        msgspec.msgpack.encode(
            {"id": REQUEST_ID, "sender": "x" * 257, "body": {"type": "ask", "transfer_id": "t"}}
        ),
        msgspec.msgpack.encode({"id": REQUEST_ID, "sender": "x", "body": {"type": "ask", "transfer_id": "t"}})
        + b"!",
        b"\x91" * 100_000,
        b"\x83\xa2id\xc4\x10" + REQUEST_ID + b"\xa6sender\xa1\xff\xa4body\xc0",
    ],
)
def test_malformed_messages_are_refused(payload: bytes) -> None:
    assert flaw_of(FrameCodec(), unsigned(payload)) == Flaw.MALFORMED


def test_a_frame_over_the_bound_is_refused_before_it_is_read() -> None:
    assert flaw_of(FrameCodec(), unsigned(bytes(MAX_REQUEST_BYTES))) == Flaw.TOO_LONG
    with pytest.raises(FrameError, match="bound"):
        FrameCodec().decode_reply(unsigned(bytes(MAX_REPLY_BYTES)))


def test_a_message_over_the_bound_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match=r"release of .* bytes"):
        FrameCodec().encode_request(REQUEST_ID, "x", Release(transfer_id="t", reason="r" * MAX_REQUEST_BYTES))


def test_a_notice_says_why_the_peer_dropped_the_frame() -> None:
    with pytest.raises(NoticeError, match="another secret"):
        FrameCodec(SECRET).decode_reply(encode_notice("signed with another secret"))
    with pytest.raises(FrameError):
        FrameCodec(SECRET).decode_reply(encode_notice("x")[:-1])


def test_frame_errors_are_the_peers_fault_and_do_not_show_the_secret() -> None:
    frame = FrameCodec(b"x" * 20).encode_request(REQUEST_ID, "d0@1", Ask(transfer_id="t"))
    with pytest.raises(RemoteProtocolError) as caught:
        FrameCodec(SECRET).decode_request(frame)
    assert SECRET.decode() not in f"{caught.value!r} {FrameCodec(SECRET)!r}"
    assert frame[HEADER_BYTES:OVERHEAD_BYTES].hex() not in repr(caught.value)


def test_a_secret_is_read_without_the_white_space_around_it(tmp_path) -> None:
    path = tmp_path / "secret"
    path.write_text("  0123456789abcdef\n")
    assert load_secret(str(path)) == b"0123456789abcdef"
    assert load_secret("") == b""


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"x" * 5000])
def test_a_bad_secret_file_is_an_operator_error_that_names_it_and_not_its_content(
    tmp_path, content: bytes
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(OperatorError, match=r"secret file .*secret") as caught:
        load_secret(str(path))
    assert not content.strip() or content.decode() not in str(caught.value)


def test_a_missing_secret_file_is_an_operator_error(tmp_path) -> None:
    with pytest.raises(OperatorError, match="No such file"):
        load_secret(str(tmp_path / "nowhere"))
