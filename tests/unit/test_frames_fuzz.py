"""Whatever comes from the network is a message or a typed error, never anything else."""

from __future__ import annotations

import contextlib
import json
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.staging import Cells
from ascend_pd.wire.frames import REQUEST_ID_BYTES, FrameCodec, FrameError, NoticeError, encode_notice
from ascend_pd.wire.http_signature import HttpSigner
from ascend_pd.wire.identity import EngineRef, Fingerprint
from ascend_pd.wire.messages import Reply, Request, Story, Verdict, WorkerInfo
from ascend_pd.wire.params import Reservation, parse_params, parse_reservation, to_dict
from ascend_pd.wire.registry import parse_engine_entry
from tests.unit.frame_samples import FINGERPRINT, REPLIES, REQUEST_ID, REQUESTS, SECRET, WORKER
from tests.unit.metaserver_fixture import reservation

SIGNED, UNSIGNED = FrameCodec(SECRET), FrameCodec()
FRAMES = [c.encode_request(REQUEST_ID, "d0@1", m) for c in (SIGNED, UNSIGNED) for m in REQUESTS]
FRAMES += [c.encode_reply(REQUEST_ID, "p0@1", m) for c in (SIGNED, UNSIGNED) for m in REPLIES]
FRAMES.append(encode_notice("wrong secret"))

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=40),
    dict[str, float]: st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=3),
    Fingerprint | None: st.sampled_from([None, FINGERPRINT]),
    Fingerprint: st.just(FINGERPRINT),
    tuple[WorkerInfo, ...]: st.lists(st.just(WORKER), max_size=3).map(tuple),
    Verdict: st.sampled_from(list(Verdict)),
    KVLayout: st.just(WORKER.layout),
    tuple[int, ...]: st.lists(st.integers(0, 2**48), max_size=4).map(tuple),
    tuple[tuple[int, ...], ...]: st.lists(st.lists(st.integers(0, 2**31), max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
    Cells: st.builds(
        Cells,
        strand=st.integers(0, 9),
        regions=st.lists(st.integers(0, 99), max_size=4).map(tuple),
        units=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=4).map(tuple),
    ),
}
VALUES[EngineRef] = st.builds(EngineRef, VALUES[str], VALUES[str])


def messages(samples: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Messages of the samples' types, with any value in fields of the types above and the sample's in the others."""

    def like(sample: Any) -> st.SearchStrategy[Any]:
        hints = typing.get_type_hints(type(sample))
        values = {name: VALUES.get(hint, st.just(getattr(sample, name))) for name, hint in hints.items()}
        return st.fixed_dictionaries(values).map(lambda fields: type(sample)(**fields))

    return st.one_of(like(sample) for sample in samples)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good frame with a few bytes changed, removed, added or moved in from another."""
    frame = bytearray(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(frame)))
        stop = start + draw(st.integers(0, 8))
        donor = draw(st.sampled_from(FRAMES))[start : start + 16]
        frame[start:stop] = draw(st.binary(max_size=8) | st.just(donor))
    return bytes(frame)


def read(codec: FrameCodec, frame: bytes) -> list[object]:
    """What either decoder makes of it; only typed errors come out of them."""
    found: list[object] = []
    for decode in (codec.decode_request, codec.decode_reply):
        with contextlib.suppress(FrameError, NoticeError):
            found.append(decode(frame).body)
    return found


@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda tail: FRAMES[-2][:37] + tail))
def test_random_bytes_are_dropped_and_random_payloads_are_messages_or_dropped(frame: bytes) -> None:
    assert read(SIGNED, frame) == []
    read(UNSIGNED, frame)


@settings(max_examples=500)
@given(damaged())
def test_a_damaged_frame_is_never_anything_else_than_a_sample_where_there_is_a_secret(frame: bytes) -> None:
    assert all(body in REQUESTS + REPLIES for body in read(SIGNED, frame))
    read(UNSIGNED, frame)


@given(messages(REQUESTS), st.text(max_size=20), st.binary(min_size=REQUEST_ID_BYTES, max_size=REQUEST_ID_BYTES))
def test_any_request_comes_back_as_it_was_sent(request: Request, sender: str, request_id: bytes) -> None:
    for codec in (SIGNED, UNSIGNED):
        envelope = codec.decode_request(codec.encode_request(request_id, sender, request))
        assert (envelope.id, envelope.sender, envelope.body) == (request_id, sender, request)


@given(messages(REPLIES))
def test_any_reply_comes_back_as_it_was_sent(reply: Reply) -> None:
    for codec in (SIGNED, UNSIGNED):
        assert codec.decode_reply(codec.encode_reply(REQUEST_ID, "p0", reply)).body == reply


@pytest.mark.parametrize("bytes_moved", [2**64, -(2**63) - 1, "\ud800", object()])
def test_what_msgpack_cannot_say_is_our_own_error(bytes_moved: Any) -> None:
    with pytest.raises(LocalProtocolError, match="story cannot be put on the wire"):
        UNSIGNED.encode_reply(REQUEST_ID, "p0", Story(known=True, bytes_moved=bytes_moved))


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode("utf-8", "replace")))
def test_random_json_is_no_reservation_and_no_engine(raw: bytes) -> None:
    for parse in (parse_reservation, parse_engine_entry):
        with pytest.raises(RemoteProtocolError):
            parse(raw)


@given(st.sampled_from(Reservation.__struct_fields__), json_values)
def test_a_reservation_with_any_one_field_changed_is_one_or_names_the_field(field: str, value: Any) -> None:
    raw = json.dumps(to_dict(reservation()) | {field: value}).encode("utf-8", "replace")
    try:
        found = parse_reservation(raw)
    except RemoteProtocolError as error:
        assert field in str(error) or "JSON is malformed" in str(error)
    else:
        assert msgspec.convert(to_dict(found), Reservation) == found


@given(st.dictionaries(st.sampled_from(["do_remote_prefill", "transfer_id", "metaserver", "x"]), json_values))
def test_random_transfer_params_are_params_or_a_remote_protocol_error(raw: dict[str, Any]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parse_params(raw)


@pytest.mark.parametrize("nonce", ["", "0" * 31, "0" * 33])
def test_a_nonce_of_another_length_is_refused_however_well_it_is_signed(nonce: str) -> None:
    signer = HttpSigner(SECRET)
    signature = signer.request_headers("GET", "/", nonce, b"")["X-Ascend-PD-Signature"]
    assert not signer.request_is_genuine("GET", "/", nonce, signature, b"")


@given(st.text(max_size=40), st.text(max_size=40), st.binary(max_size=40), st.data())
def test_an_http_signature_holds_for_its_own_request_only(
    target: str, nonce_text: str, body: bytes, data: st.DataObject
) -> None:
    signer, nonce = HttpSigner(SECRET), "0" * 32
    signature = signer.request_headers("GET", target, nonce, body)["X-Ascend-PD-Signature"]
    assert signer.request_is_genuine("GET", target, nonce, signature, body)
    other = data.draw(st.sampled_from(["method", "target", "nonce", "signature", "body", "reply"]))
    assert not {
        "method": lambda: signer.request_is_genuine("DELETE", target, nonce, signature, body),
        "target": lambda: signer.request_is_genuine("GET", target + "?", nonce, signature, body),
        "nonce": lambda: signer.request_is_genuine("GET", target, nonce_text, signature, body),
        "signature": lambda: signer.request_is_genuine("GET", target, nonce, nonce_text, body),
        "body": lambda: signer.request_is_genuine("GET", target, nonce, signature, body + b"x"),
        "reply": lambda: signer.reply_is_genuine(200, nonce, signature, body),
    }[other]()
