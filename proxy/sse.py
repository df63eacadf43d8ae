"""Server-sent events as bytes: whole events across any split of the stream, and vLLM's error events recognised.

An event ends with an empty line. vLLM writes `\\n\\n`; `\\r\\n\\r\\n` is read too. Events are cut and searched,
never parsed, unless one looks like an error.

What vLLM 0.32 sends: chat and completions end with `data: [DONE]`, after an error too, which is
`data: {"error": {…}}`. `/v1/responses` and `/v1/messages` name their events (`event: NAME`), never send [DONE] and end
with their body; an error of `/v1/messages` is `event: error`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

ENDS = tuple(b"data:%s[DONE]%s" % (space, line * 2) for space in (b" ", b"") for line in (b"\n", b"\r\n"))
"""How a stream's last piece ends; a cheap first look before `ends_stream`."""
_END = re.compile(rb"(?:\A|\n)data: ?\[DONE\](?:\r?\n){2}\Z")
_ERROR_LINE = re.compile(rb'^(?:data:[ \t]*\{[ \t]*"error"|event: ?error\r?$)', re.MULTILINE)
_SUSPICIOUS = b"error"
MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE = 4096
"""Characters of an engine's error message that are passed on."""


class EventCutter:
    """Feeds on pieces of a byte stream, returns whole events."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """All events that are whole now, as one piece of bytes (possibly empty).

        Raises:
            ValueError: an event longer than MAX_EVENT_BYTES.
        """
        data = self._rest + piece if self._rest else piece
        if data.endswith((b"\n\n", b"\n\r\n")):
            self._rest = b""
            return data
        end = max(_after(data, b"\n\n"), _after(data, b"\n\r\n"))
        self._rest = data[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return data[:end]

    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest


def _after(data: bytes, mark: bytes) -> int:
    position = data.rfind(mark)
    return position + len(mark) if position >= 0 else 0


def split_events(data: bytes) -> list[bytes]:
    """Whole events of `data`, each with its closing empty line."""
    events = []
    start = 0
    while start < len(data):
        ends = [at + len(mark) for mark in (b"\n\n", b"\n\r\n") if (at := data.find(mark, start)) >= 0]
        if not ends:
            break
        end = min(ends)
        events.append(data[start:end])
        start = end
    return events


def ends_stream(events: bytes) -> bool:
    """Is the last of these whole events `data: [DONE]`? One comparison for any other event."""
    return events.endswith(ENDS) and _END.search(events) is not None


class _Error(msgspec.Struct):
    message: Any = ""
    code: Any = None


class _ErrorEnvelope(msgspec.Struct):
    error: _Error | str | None = None
    type: Any = None
    message: Any = None


class ErrorEvent(NamedTuple):
    """An engine's error in a stream."""

    before: bytes
    """The good events before it."""
    status: int
    message: str


def find_error(events: bytes) -> ErrorEvent | None:
    """The first of these whole events that reports an error; what a client can put into a payload is none.

    A mark counts at the start of a line only, where text inside a JSON string cannot stand, and only with an error
    object behind it. For all other events this is one cheap search.
    """
    if _SUSPICIOUS not in events or _ERROR_LINE.search(events) is None:
        return None
    start = 0
    for event in split_events(events):
        if _ERROR_LINE.search(event) is not None:
            error = _error_of(payload_of(event))
            if error is not None:
                return ErrorEvent(events[:start], *error)
        start += len(event)
    return None


def read_error(body: bytes) -> tuple[int, str]:
    """(status, message) of an error object in OpenAI's or Anthropic's shape; (500, "") when it is none."""
    return _error_of(body) or (500, "")


def _error_of(body: bytes) -> tuple[int, str] | None:
    try:
        envelope = msgspec.json.decode(body, type=_ErrorEnvelope)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    error = envelope.error
    if error is None:  # the events of /v1/responses have it without an envelope
        if envelope.type != "error" or not isinstance(envelope.message, str):
            return None
        error = envelope.message
    if isinstance(error, str):
        return 500, error[:MAX_MESSAGE]
    status = error.code if type(error.code) is int and 400 <= error.code < 600 else 500
    return status, error.message[:MAX_MESSAGE] if isinstance(error.message, str) else ""


def payload_of(event: bytes) -> bytes:
    """The data of one event; several data lines are joined by line breaks, as the standard says."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
