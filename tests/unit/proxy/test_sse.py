"""Events stay whole and unchanged however the byte stream is split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sse import EventCutter, has_error, payload_of, read_error, split_at_error, split_events
from tests.fakes.engine import ERROR_EVENT, stream_events

BODY = {"prompt": "p", "max_tokens": 4, "stream_options": {"include_usage": True}}
STREAM = b"".join(stream_events("/v1/completions", BODY, "m"))

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
events = st.lists(
    texts.map(lambda t: b"data: " + json.dumps({"choices": [{"text": t}]}, ensure_ascii=False).encode() + b"\n\n"),
    min_size=1,
    max_size=8,
)


def cut(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    cutter = EventCutter()
    outputs = [cutter.feed(piece) for piece in pieces]
    return outputs, cutter.rest()


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_a_stream_split_at_any_byte_comes_out_in_whole_events(at: int) -> None:
    outputs, rest = cut([STREAM[:at], STREAM[at:]])
    assert b"".join(outputs) == STREAM
    assert rest == b""
    assert all(not o or o.endswith(b"\n\n") for o in outputs)


@given(events, st.data())
def test_any_events_split_anywhere_come_out_whole_and_unchanged(stream: list[bytes], data: st.DataObject) -> None:
    joined = b"".join(stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(joined)), max_size=12)))
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    outputs, rest = cut(pieces)
    assert b"".join(outputs) == joined
    assert rest == b""
    assert [e for o in outputs for e in split_events(o)] == stream
    assert all(not has_error(o) for o in outputs)


@given(events, st.integers(1, 30))
def test_an_unfinished_event_is_held_back(stream: list[bytes], missing: int) -> None:
    joined = b"".join(stream)
    outputs, rest = cut([joined[: -min(missing, len(stream[-1]) - 1)]])
    assert b"".join(outputs) == b"".join(stream[:-1])
    assert rest


@pytest.mark.parametrize("at", range(1, 30))
def test_carriage_returns_are_understood_at_any_split(at: int) -> None:
    stream = b"data: one\r\n\r\ndata: two\r\n\r\n"
    outputs, rest = cut([stream[:at], stream[at:]])
    assert b"".join(outputs) + rest == stream
    assert rest == b""


@given(texts)
def test_text_that_looks_like_an_error_is_none(text: str) -> None:
    content = 'data: {"error": ' + text
    event = b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}).encode() + b"\n\n"
    assert not has_error(event)


def test_an_error_event_is_found_and_what_follows_it_is_dropped() -> None:
    good, status, message = split_at_error(b"data: {}\n\n" + ERROR_EVENT + b"data: [DONE]\n\n")
    assert (good, status, message) == (b"data: {}\n\n", 500, "EngineCore request failed")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"error": {"message": "m", "code": 404}}', (404, "m")),
        (b'{"error": {"message": "m", "code": "x"}}', (500, "m")),
        (b'{"error": "m"}', (500, "m")),
        (b'{"error": {"message": "m", "code": 200}}', (500, "m")),
        (b"{}", (500, "")),
        (b"<html>", (500, "")),
    ],
)
def test_errors_of_any_shape_have_a_status_and_a_message(body: bytes, wanted: tuple[int, str]) -> None:
    assert read_error(body) == wanted


def test_an_endless_event_is_refused() -> None:
    cutter = EventCutter()
    with pytest.raises(ValueError, match="longer"):
        for _ in range(20):
            cutter.feed(b"x" * (1 << 20))


def test_payloads_of_several_lines_are_joined() -> None:
    assert payload_of(b"event: e\ndata: a\ndata:b\n\n") == b"a\nb"
