"""HTTP to engines. The one file that knows the client library; its errors leave here as `LegFailed`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from proxy.errors import LegFailed
from proxy.settings import TimeoutSettings


class Answer:
    """An answer whose head has arrived. Closing it before its end makes the engine abort."""

    def __init__(self, response: aiohttp.ClientResponse, who: str) -> None:
        self._response = response
        self._who = who
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self.streaming = self.content_type.startswith("text/event-stream")

    async def piece(self, timeout_s: float) -> bytes:
        """The next bytes, empty at the end.

        Raises:
            LegFailed: the connection broke or nothing came in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._response.content.readany()
        except TimeoutError as error:
            raise LegFailed(f"{self._who} sent nothing for {timeout_s:g} s", 504, kind="timeout") from error
        except aiohttp.ClientError as error:
            raise LegFailed(f"{self._who} broke off its answer", kind="connection_lost") from error

    async def read(self, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            LegFailed: as `piece`.
        """
        pieces = []
        while piece := await self.piece(timeout_s):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Let go; a finished answer gives its connection back for reuse."""
        self._response.close()


class Upstream:
    """A pool of connections to all engines."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
            auto_decompress=False,
            read_bufsize=1 << 18,
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], who: str, timeout_s: float) -> Answer:
        """Send and wait for the head of the answer.

        Raises:
            LegFailed: no connection, or no head within `timeout_s`.
        """
        return await self._send("POST", url, body, headers, who, timeout_s)

    async def get(self, url: str, headers: Mapping[str, str], who: str, timeout_s: float) -> Answer:
        """As `post`."""
        return await self._send("GET", url, b"", headers, who, timeout_s)

    async def _send(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], who: str, timeout_s: float
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._session.request(
                    method, url, data=body or None, headers=headers, allow_redirects=False
                )
        except TimeoutError as error:
            raise LegFailed(f"{who} did not answer within {timeout_s:g} s", 504, kind="timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise LegFailed(f"{who} cannot be reached", kind="connect_failed") from error
        except aiohttp.ClientError as error:
            raise LegFailed(f"{who} broke the connection", kind="connection_lost") from error
        return Answer(response, who)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
