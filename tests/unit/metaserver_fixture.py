"""A metaserver on a thread of this process, and a plain client for it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette

from ascend_pd.wire.http_signature import SIGNATURE_HEADER, HttpSigner
from ascend_pd.wire.params import Reservation
from metaserver.__main__ import bind, uvicorn_config
from metaserver.app import create_app
from metaserver.settings import Settings

HOST = "127.0.0.1"
SECRET = b"a shared secret of some length"
NONCE = "0123456789abcdef" * 2


def reservation(transfer_id: str = "t1", **changes: Any) -> Reservation:
    """A good reservation."""
    plain: dict[str, Any] = {
        "transfer_id": transfer_id,
        "sink_engine_id": "d0",
        "sink_epoch": "epoch-d",
        "sink_host": "10.0.0.2",
        "sink_port": 36100,
        "block_ids": [[3, 4, 5]],
        "block_size": 16,
        "tp_size": 1,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
        "prompt_hash": "ab",
        "deadline_seconds": 30.0,
    }
    return msgspec.convert(plain | changes, Reservation)


class Served:
    """A running metaserver."""

    def __init__(
        self, settings: Settings, port: int = 0, mount: Callable[[Starlette], Starlette] | None = None
    ) -> None:
        listener = bind(HOST, port)
        self.port = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.settings = settings
        app = create_app(settings)
        self.metaserver = app.state.metaserver
        self._server = uvicorn.Server(uvicorn_config(app if mount is None else mount(app)))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()

    def call(
        self, method: str, target: str, body: bytes = b"", secret: bytes | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and parsed body of one request, signed like a client of the same secret (or of `secret`)."""
        secret = self.settings.secret if secret is None else secret
        signer = HttpSigner(secret)
        connection = http.client.HTTPConnection(HOST, self.port, timeout=20)
        try:
            connection.request(method, target, body, signer.request_headers(method, target, NONCE, body) | headers)
            response = connection.getresponse()
            raw = response.read()
            if signer.authenticated and self.settings.secret == secret and not headers:
                assert signer.reply_is_genuine(
                    response.status, NONCE, response.getheader(SIGNATURE_HEADER, ""), raw
                )
        finally:
            connection.close()
        is_json = response.getheader("content-type", "").startswith("application/json")
        return response.status, msgspec.json.decode(raw) if is_json else raw

    def post(self, posted: Reservation) -> tuple[int, Any]:
        return self.call("POST", "/v1/metaserver", msgspec.json.encode(posted))


@contextmanager
def metaserver(
    port: int = 0, mount: Callable[[Starlette], Starlette] | None = None, **settings: Any
) -> Iterator[Served]:
    """A metaserver; `mount` puts its app into another one."""
    served = Served(Settings(**settings), port, mount)
    try:
        yield served
    finally:
        served.stop()
