"""Requests as plain ASGI: who asks, what, is there room, and then the exchange."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from ascend_pd.errors import LocalProtocolError
from proxy.admission import Admission
from proxy.auth import bearer
from proxy.downstream import ABORT, AsgiDownstream, Downstream
from proxy.errors import LegFailed, ProxyError, Refused
from proxy.exchange import Exchange
from proxy.group import Group
from proxy.record import Record
from proxy.request import MAX_NAME, TOO_DEEP, WHOLE_PATHS, ClientRequest, Route, parse_request
from proxy.services import Services
from proxy.settings import KeyLimits, Role
from proxy.split import Member, member_request, members
from proxy.stepped import Stepped
from proxy.tracing import Trace

CLIENT_CLOSED = 499
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_INTERNAL_HEADERS = frozenset(
    (b"x-data-parallel-rank", b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port")
)
_INTERNAL_PREFIX = b"x-ascend-pd-"
MAX_HEADERS = 128
BODY_S = 120.0
"""For bodies that no setting speaks of."""


class ClientGone(Exception):
    """The client closed the connection."""


@dataclass(slots=True)
class Head:
    """What of the request's headers matters here."""

    authorization: bytes = b""
    api_key: bytes = b""
    request_id: bytes = b""
    traceparent: bytes = b""
    tracestate: bytes = b""
    session: bytes = b""
    content_length: bytes = b""


_HEAD_FIELDS = {
    b"authorization": "authorization",
    b"x-api-key": "api_key",
    b"x-request-id": "request_id",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
    b"x-session-id": "session",
    b"content-length": "content_length",
}


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> Head:
    """Read the headers.

    Raises:
        Refused: a header that only the proxy may set, or too many of them.
    """
    head = Head()
    for number, (name, value) in enumerate(headers):
        if number >= MAX_HEADERS:
            raise Refused(f"more than {MAX_HEADERS} headers", status=431)
        field = _HEAD_FIELDS.get(name)
        if field is not None:
            setattr(head, field, value)
        elif name in _INTERNAL_HEADERS or name.startswith(_INTERNAL_PREFIX):
            raise Refused(f"the header {name.decode('latin-1')} is internal and may not be sent by a client")
    return head


def request_id_of(head: Head) -> str:
    """The client's request id, if it is one; else a new one."""
    if head.request_id and _REQUEST_ID.fullmatch(head.request_id):
        return head.request_id.decode("ascii")
    return os.urandom(16).hex()


def session_of(request: ClientRequest) -> str:
    """The body's own hint at who belongs together."""
    for field in ("prompt_cache_key", "user"):
        value = request.body.get(field)
        if isinstance(value, str) and value:
            return value[:MAX_NAME]
    return ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request whose sender is known and whose body has been read."""

    services: Services
    path: str
    raw: bytes
    head: Head
    down: AsgiDownstream
    record: Record
    trace: Trace


Work = Callable[[], Awaitable[None]]
Prepare = Callable[[Entry], Work]
"""Looks at the body and says what is to be done once the request is admitted; both may raise ProxyError."""


async def serve(
    services: Services,
    path: str,
    scope: Scope,
    receive: Receive,
    send: Send,
    prepare: Prepare | None = None,
    route: str = "",
) -> None:
    """One request under all the rules of this proxy: keys, limits, admission, deadline, journal.

    Args:
        prepare: what kind of request it is; token-carrying unless told otherwise.
        route: for the journal, while the request has not been looked at.
    """
    record = Record(request_id="", path=path[:MAX_NAME], route=route, received_at=time.monotonic())
    down = AsgiDownstream(send, scope.get("extensions", {}).get(ABORT))  # type: ignore[arg-type]
    trace: Trace | None = None
    try:
        head = read_head(scope["headers"])
        record.request_id = request_id_of(head)
        down.base = [(b"x-request-id", record.request_id.encode())]
        trace = services.tracing.begin(
            record.path, head.traceparent.decode("latin-1"), head.tracestate.decode("latin-1")
        )
        key = services.keyring.check(bearer(head.authorization, head.api_key))
        if key is not None:
            record.key = key.name
        most, body_s = services.settings.admission.max_body_bytes, services.settings.timeouts.body_s
        raw = await read_body(receive, most, head.content_length, body_s)
        work = (prepare or _exchanging)(Entry(services, path, raw, head, down, record, trace))
        admitted = _admitted(services.admission, record.key, key.limits if key else None, work)
        await _until_gone(admitted, down, receive, services.settings.timeouts.request_s)
    except ProxyError as error:
        record.error = error.kind or "refused"
        await down.error(error)
    except TimeoutError:
        record.error = "timeout"
        await down.error(LegFailed("the request took longer than this proxy allows", 504, kind="timeout"))
    except ClientGone:
        record.error = "client_gone"
        down.status = down.status or CLIENT_CLOSED
    finally:
        record.status = down.status
        record.ended_at = time.monotonic()
        services.journal.add(record)
        if trace is not None:
            trace.end(record)


def _note(record: Record, request: ClientRequest) -> None:
    record.model = request.model
    record.stream = request.stream
    record.route = request.route
    record.prompt_tokens = request.prompt_tokens


async def _admitted(admission: Admission, key: str, limits: KeyLimits | None, work: Work) -> None:
    """Wait for a place, then work."""
    place = await admission.enter(key, limits)
    try:
        await work()
    finally:
        place.leave()


def _exchanging(entry: Entry) -> Work:
    """A token-carrying request."""
    request = parse_request(entry.path, entry.raw)
    entry.down.names_events = request.path in WHOLE_PATHS
    _note(entry.record, request)
    return _Serving(entry, request).run


class _Serving:
    """One admitted request."""

    def __init__(self, entry: Entry, request: ClientRequest) -> None:
        self._services = entry.services
        self._request = request
        self._down = entry.down
        self._record = entry.record
        self._head = entry.head
        self._trace = entry.trace

    async def run(self) -> None:
        """Exchange.

        Raises:
            ProxyError
        """
        await self._exchange_all(self._engine_headers())

    async def _exchange_all(self, headers: dict[str, str]) -> None:
        if self._request.route is not Route.SPLIT or not self._services.fleet.instances(Role.PREFILL):
            await self._exchange(None, self._down, headers)
            return

        async def run_member(member: Member, place: Downstream) -> None:
            await self._exchange(member, place, headers)

        group = Group(self._down, self._request.stream)
        await group.run(members(self._request), run_member, self._services.settings.admission.split_at_once)

    async def _exchange(self, member: Member | None, down: Downstream, headers: dict[str, str]) -> None:
        session = self._head.session.decode("latin-1") or session_of(self._request)
        try:
            request = self._request if member is None else member_request(self._request, member)
            exchange = Exchange(self._services, request, down, headers, self._record, self._trace, session)
            await exchange.run()
        except RecursionError as error:
            # what could just be read may be too deep to be written again, further down the stack
            raise Refused(TOO_DEEP) from error

    def _engine_headers(self) -> dict[str, str]:
        return {
            "content-type": "application/json",
            "x-request-id": self._record.request_id,
            **self._services.engine_headers,
        }


class _Watch:
    """Cancels the serving task when the client leaves or the request's time is over."""

    __slots__ = ("_down", "_handle", "_receive", "_task", "_waiting", "why")

    def __init__(self, down: AsgiDownstream, receive: Receive, request_s: float) -> None:
        task = asyncio.current_task()
        if task is None:
            raise LocalProtocolError("requests are served in tasks")
        self._task = task
        self._down = down
        self._receive = receive
        self.why: Exception | None = None
        self._waiting: Stepped | None = None
        self._handle = task.get_loop().call_later(request_s, self._end, TimeoutError())
        self._listen()

    def _listen(self) -> None:
        self._waiting = Stepped(self._receive(), self._heard)  # type: ignore[arg-type]
        if self._waiting.done:
            self._heard(self._waiting)

    def _heard(self, waiting: Stepped) -> None:
        if waiting.error is not None or waiting.result["type"] == "http.disconnect":
            self._end(ClientGone())
        else:
            self._listen()

    def _end(self, why: Exception) -> None:
        # Servers also report a disconnect after a complete answer.
        if self.why is None and not self._down.finished:
            self.why = why
            self._task.cancel()

    def close(self) -> None:
        """Watch no longer."""
        self._handle.cancel()
        if self._waiting is not None:
            self._waiting.close()


async def _until_gone(
    serving: Coroutine[Any, Any, None], down: AsgiDownstream, receive: Receive, request_s: float
) -> None:
    """Run; a client that leaves, or a request that takes too long, cancels it and with it both legs.

    Raises:
        ClientGone, TimeoutError, ProxyError
    """
    watch = _Watch(down, receive, request_s)
    try:
        await serving
    except asyncio.CancelledError:
        if watch.why is None:
            raise
        asyncio.current_task().uncancel()  # type: ignore[union-attr]
        raise watch.why from None
    finally:
        watch.close()


async def read_body(receive: Receive, limit: int, content_length: bytes, timeout_s: float = BODY_S) -> bytes:
    """The request body.

    Raises:
        Refused: larger than `limit` (413), or not whole within `timeout_s` (408).
        ClientGone: disconnected before its end.
    """
    if content_length.isdigit() and int(content_length[:20]) > limit:
        raise Refused(f"the body is larger than {limit} bytes", status=413)
    try:
        async with asyncio.timeout(timeout_s):
            return await _pieces(receive, limit)
    except TimeoutError as error:
        raise Refused(f"the body did not come within {timeout_s:g} s", status=408) from error


async def _pieces(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise Refused(f"the body is larger than {limit} bytes", status=413)
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces) if len(pieces) > 1 else piece
