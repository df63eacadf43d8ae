"""Server-sent events as bytes: whole events across any split of the stream, and vLLM's error events recognised.

An event ends with an empty line. vLLM writes `\\n\\n`; `\\r\\n\\r\\n` is read too. Events are cut and searched,
never parsed, unless one is an error.
"""

from __future__ import annotations

import msgspec

STREAM_END = b"data: [DONE]\n\n"
_ERROR_MARKS = (b'data: {"error"', b'data:{"error"', b"event: error")
_SUSPICIOUS = b"error"
MAX_EVENT_BYTES = 16 << 20


class EventCutter:
    """Feeds on pieces of a byte stream, returns whole events.

    A quote inside a JSON string is escaped, so the error marks cannot occur inside a token's text.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """All events that are whole now, as one piece of bytes (possibly empty).

        Raises:
            ValueError: an event longer than MAX_EVENT_BYTES.
        """
        data = self._rest + piece if self._rest else piece
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self._rest = b""
            return data
        end = max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
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
        ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := data.find(mark, start)) >= 0]
        if not ends:
            break
        end = min(ends)
        events.append(data[start:end])
        start = end
    return events


def has_error(events: bytes) -> bool:
    """Does one of these whole events report an error? A cheap search, exact by the class note above."""
    return _SUSPICIOUS in events and any(mark in events for mark in _ERROR_MARKS)


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _ErrorEnvelope(msgspec.Struct):
    error: _Error | str


def read_error(body: bytes) -> tuple[int, str]:
    """(status, message) of an OpenAI error object; (500, "") when it is none."""
    try:
        error = msgspec.json.decode(body, type=_ErrorEnvelope).error
    except msgspec.DecodeError:
        return 500, ""
    if isinstance(error, str):
        return 500, error
    status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
    return status, error.message


def split_at_error(events: bytes) -> tuple[bytes, int, str]:
    """(the good events before the error, its status, its message)."""
    good: list[bytes] = []
    for event in split_events(events):
        if has_error(event):
            data = event[event.find(b"{") :] if b"{" in event else b""
            status, message = read_error(data.strip())
            return b"".join(good), status, message
        good.append(event)
    return events, 0, ""


def payload_of(event: bytes) -> bytes:
    """The data of one event; several data lines are joined by line breaks, as the standard says."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
