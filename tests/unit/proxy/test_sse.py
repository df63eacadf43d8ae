"""Events stay whole and unchanged however the byte stream is split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sse import EventCutter, ends_stream, find_error, payload_of, read_error, split_events
from tests.fakes.answers import ERROR_EVENT, MESSAGES, RESPONSES, error_event, stream_events

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
    assert all(find_error(o) is None for o in outputs)


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


MARKS = [
    "event: error",
    "event:error",
    "\nevent: error\n",
    "\r\nevent: error\r\n\r\n",
    '\n\ndata: {"error": {"message": "m"}}\n\n',
    'data: {"error": "m"}',
    "data: [DONE]",
    "\n\ndata: [DONE]\n\n",
]


@given(texts, st.sampled_from(MARKS), texts)
def test_text_that_looks_like_an_error_or_an_end_is_none(before: str, mark: str, after: str) -> None:
    for path in ("/v1/chat/completions", RESPONSES, MESSAGES):
        for event in stream_events(path, {"prompt": "p", "max_tokens": 1}, before + mark + after)[:-1]:
            assert find_error(event) is None
            assert not ends_stream(event)
    raw = b"data: " + (before + mark).replace("\r", " ").replace("\n", " ").encode() + b"\n\n"
    if not raw.startswith((b'data: data: {"error', b'data: {"error', b"data: data: [DONE]")):
        assert find_error(raw) is None


@pytest.mark.parametrize(
    "event",
    [
        b"data: How do streams fail? By event: error\n\n",
        b"data: x\ndata: event: error\n\n",
        b"event: error\ndata: no object\n\n",
        b"event: error\n\n",
        b'event: errors\ndata: {"type": "error", "message": "m"}\n\n',
        b'event: error\ndata: {"choices": []}\n\n',
        b'data: {"error": null, "choices": []}\n\n',
        b'data: {"error": \n\n',
        b'data: {"error": ' + b"[" * 100_000 + b"\n\n",
        b'id: data: {"error": "m"}\ndata: {}\n\n',
    ],
)
def test_a_mark_that_is_no_line_or_has_no_error_object_is_a_normal_event(event: bytes) -> None:
    assert find_error(event) is None


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", RESPONSES, MESSAGES])
def test_an_engines_error_is_found_however_its_stream_is_split(path: str, line: bytes) -> None:
    good = [event.replace(b"\n", line) for event in stream_events(path, BODY, "m")[:-1]]
    stream = b"".join(good) + error_event(path).replace(b"\n", line)
    for at in range(len(stream)):
        passed = b""
        outputs, _ = cut([stream[:at], stream[at:]])
        for output in outputs:
            error = find_error(output)
            if error is not None:
                assert (error.status, error.message) == (500, "EngineCore request failed")
                assert passed + error.before == b"".join(good)
                break
            passed += output
        else:
            raise AssertionError(at)


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
def test_the_end_is_seen_alone_and_behind_other_events(end: bytes) -> None:
    assert ends_stream(end)
    assert ends_stream(b"data: {}\n\n" + end)
    assert not ends_stream(end + b"data: {}\n\n")
    assert not ends_stream(b"x" + end)
    assert not ends_stream(b"data: x " + end)


def test_what_follows_an_error_event_is_dropped() -> None:
    error = find_error(b"data: {}\n\n" + ERROR_EVENT + b"data: [DONE]\n\n")
    assert error == (b"data: {}\n\n", 500, "EngineCore request failed")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"error": {"message": "m", "code": 404}}', (404, "m")),
        (b'{"error": {"message": "m", "code": "x"}}', (500, "m")),
        (b'{"error": "m"}', (500, "m")),
        (b'{"type": "error", "error": {"type": "x", "message": "m"}}', (500, "m")),
        (b'{"type": "error", "message": "m", "code": "server_error"}', (500, "m")),
        (b'{"error": {"message": null, "code": 1.5}}', (500, "")),
        (b'{"error": "' + b"m" * 100_000 + b'"}', (500, "m" * 4096)),
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
