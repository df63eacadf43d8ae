"""uvicorn's httptools protocol with bounds on what a client may leave unfinished, in bytes and in time.

httptools itself keeps heads and trailers of any size and waits for them for ever; uvicorn closes a connection only
once all has been sent, which a client that does not read puts off for ever. The body of a request is bounded by whoever
reads it; what is left of it when the answer is complete, here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.downstream import ABORT

MAX_HEAD_BYTES = 64 << 10
"""Of a head, and of the trailers or a chunk's extensions."""
HEAD_S = 30.0
"""For a head from its first byte, for the first one from the connection's beginning, and for the rest of a request
that has its answer."""
FLUSH_S = 75.0
"""For a client to take what it has not yet read when its connection closes; as long as idle ones are kept."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """For `uvicorn.Config(http=…)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        """In a head, or between requests."""
        self._begun = False
        """In a head of which a byte has come."""
        self._moved = False
        """The parser got somewhere with the bytes at hand."""
        self._had_body = False
        self._unparsed_bytes = 0
        """Received since it last did."""
        self._input_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound_input()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unbound_input()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = self._had_body = False
        super().data_received(data)
        if (self._begun and not self._had_body) or not self._moved:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse()
        if self._input_timer is None and self._in_head and (self._begun or not self._moved):
            self._bound_input()

    def on_message_begin(self) -> None:
        self._unbound_input()
        self._begun = True
        self._progress()
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._unbound_input()
        self._in_head = self._begun = False
        self._progress()
        super().on_headers_complete()
        self.headers = list(self.headers)  # trailers come to this list; the request's own is complete

    def on_chunk_header(self) -> None:
        self._progress()

    def on_body(self, body: bytes) -> None:
        self._had_body = True
        self._progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unbound_input()
        self._in_head = True
        self._progress()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self._input_timer is None:
            self._bound_input()
        if self.transport.is_closing():
            self._bound_flush()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # as long as that it has not read its answer
        else:
            super().timeout_keep_alive_handler()

    def _progress(self) -> None:
        self._moved = True
        self._unparsed_bytes = 0

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self) -> None:
        if self._answering() and (self._in_head or self.cycle.response_started):
            self.transport.abort()  # nothing may be written into another answer
            return
        self.transport.write(_TOO_LARGE)
        self.transport.close()
        self._bound_flush()

    def _bound_input(self) -> None:
        self._input_timer = self.loop.call_later(HEAD_S, self._input_due)

    def _unbound_input(self) -> None:
        if self._input_timer is not None:
            self._input_timer.cancel()
            self._input_timer = None

    def _input_due(self) -> None:
        self._input_timer = None
        if not self._answering():
            self.transport.abort()
        elif self._in_head:  # an earlier request is being answered, and reading may be paused for that
            self._bound_input()

    def _bound_flush(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = self.loop.call_later(FLUSH_S, self.transport.abort)
