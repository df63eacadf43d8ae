"""Asking the metaserver from an event loop, signed, again and again until the caller's deadline.

The proxy uses it as it is, the connectors by way of a thread of theirs.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from ascend_pd.errors import RemoteProtocolError, TransferError, UnreachableError
from ascend_pd.wire.http_signature import SIGNATURE_HEADER, HttpSigner
from ascend_pd.wire.params import Reservation, parse_reservation
from ascend_pd.wire.registry import EngineEntry

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
_LONG_POLL_S = 20.0
_PAUSE_S = 0.2
_GRACE_S = 5.0
_MAX_REPLY_BYTES = 4 << 20


class _Engines(msgspec.Struct, frozen=True):
    engines: list[EngineEntry]


class MetaserverClient:
    """Belongs to one event loop. `metaserver` is a base URL, `deadline` an instant of `time.monotonic`.

    Every method asks again while nobody answers, or answers with a 5xx. It raises UnreachableError at the deadline
    (or within a second from then), RemoteProtocolError when the metaserver refuses or has another secret.
    """

    def __init__(self, secret: bytes) -> None:
        self._signer = HttpSigner(secret)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, metaserver: str, reservation: Reservation, deadline: float) -> None:
        """Have the metaserver accept a reservation whose `deadline_seconds` end at `deadline`."""
        left_s = max(0.001, deadline - time.monotonic())
        body = msgspec.json.encode(msgspec.structs.replace(reservation, deadline_seconds=left_s))
        await self._demand(202, "POST", metaserver, "/v1/metaserver", body, deadline)

    async def wait_for(self, metaserver: str, transfer_id: str, deadline: float) -> Reservation:
        """The reservation as soon as D has posted it.

        Raises:
            TransferError: it has ended; says why.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            begun, wait_s = time.monotonic(), min(_LONG_POLL_S, left_s)
            target = f"{_target_of(transfer_id)}?wait_s={wait_s:.3f}"
            status, reply = await self._until_answered("GET", metaserver, target, b"", deadline, wait_s)
            if status == 200:
                return parse_reservation(reply)
            if status == 410:
                raise TransferError(_message_of(status, reply), quiesced=True)
            if status != 404:
                raise _refusal(metaserver, status, reply)
            if time.monotonic() - begun < wait_s / 2:  # it is stopping, or not a metaserver at all
                await asyncio.sleep(min(_PAUSE_S, wait_s))
        raise UnreachableError(f"no reservation for {transfer_id} by the deadline")

    async def withdraw(self, metaserver: str, transfer_id: str, reason: str, deadline: float) -> None:
        """End a reservation, posted already or not: who waits for it is told."""
        target = f"{_target_of(transfer_id)}?reason={quote(reason[:200], safe='')}"
        await self._demand(200, "DELETE", metaserver, target, b"", deadline)

    async def register(self, metaserver: str, entry: EngineEntry, deadline: float) -> None:
        """Tell once that this engine lives for another `ttl_seconds`."""
        await self._demand(200, "POST", metaserver, "/v1/engines", msgspec.json.encode(entry), deadline)

    async def engines(self, metaserver: str, role: str, deadline: float) -> list[EngineEntry]:
        """Live engines of one role, or of all when it is empty."""
        target = f"/v1/engines?role={quote(role, safe='')}" if role else "/v1/engines"
        reply = await self._demand(200, "GET", metaserver, target, b"", deadline)
        try:
            return msgspec.json.decode(reply, type=_Engines).engines
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"metaserver {metaserver}: list of engines: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _demand(
        self, expected: int, method: str, metaserver: str, target: str, body: bytes, deadline: float
    ) -> bytes:
        status, reply = await self._until_answered(method, metaserver, target, body, deadline)
        if status != expected:
            raise _refusal(metaserver, status, reply)
        return reply

    async def _until_answered(
        self, method: str, metaserver: str, target: str, body: bytes, deadline: float, wait_s: float = 0.0
    ) -> tuple[int, bytes]:
        """The first answer below 500, asking again with growing pauses."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                timeout_s = min(wait_s + _GRACE_S, max(0.0, deadline - time.monotonic()) + 1.0)
                status, reply = await self._exchange(method, metaserver, target, body, timeout_s)
                if status < 500:
                    return status, reply
                trouble = _message_of(status, reply)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() + retry_s >= deadline:
                raise UnreachableError(f"metaserver {metaserver}: {trouble}")
            await asyncio.sleep(retry_s)
            retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)

    async def _exchange(
        self, method: str, metaserver: str, target: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))
        url = URL(metaserver.rstrip("/") + target, encoded=True)
        nonce = os.urandom(16).hex()
        headers = self._signer.request_headers(method, url.raw_path_qs, nonce, body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=2.0)
        async with self._session.request(
            method, url, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            reply = await _read_bounded(response)
            signature = response.headers.get(SIGNATURE_HEADER, "")
            # A 5xx may come from something in between; it is no answer, so it needs no signature.
            if response.status < 500 and not self._signer.reply_is_genuine(
                response.status, nonce, signature, reply
            ):
                hint = _message_of(response.status, reply) if response.status == 401 else "not ours"
                raise RemoteProtocolError(
                    f"metaserver {metaserver}: the reply is not signed with our secret ({hint})"
                )
            return response.status, reply


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        chunks += chunk
        if len(chunks) > _MAX_REPLY_BYTES:
            raise RemoteProtocolError(f"the metaserver's reply is longer than {_MAX_REPLY_BYTES} bytes")
    return bytes(chunks)


def _target_of(transfer_id: str) -> str:
    return f"/v1/reservations/{quote(transfer_id, safe='')}"


def _refusal(metaserver: str, status: int, reply: bytes) -> RemoteProtocolError:
    return RemoteProtocolError(f"metaserver {metaserver} refuses: {_message_of(status, reply)}")


def _message_of(status: int, reply: bytes) -> str:
    try:
        content: Any = msgspec.json.decode(reply)
        return f"HTTP {status}: {str(content['error']['message'])[:512]}"
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
        return f"HTTP {status}"
