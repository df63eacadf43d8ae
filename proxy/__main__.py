"""`python -m proxy`: load the settings, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn
import uvloop

from ascend_pd.errors import OperatorError
from proxy.admin import create_admin_app
from proxy.app import ProxyApp, create_app
from proxy.bounded_http import BoundedHttp
from proxy.load import load_secrets, load_settings, reader_of
from proxy.settings import Settings

_log = logging.getLogger("proxy")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after an orderly stop, 2 when the settings or a port cannot be used."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        settings = load_settings(arguments)
        secrets = load_secrets(settings)
        listener = bind(settings.host, settings.port)
        admin_listener = (
            bind(settings.listener.admin_host, settings.listener.admin_port) if has_admin(settings) else None
        )
    except OperatorError as error:
        print(f"proxy: {error}", file=sys.stderr)
        return 2
    app = create_app(settings, secrets)
    _tame_collector()
    server = Server(uvicorn_config(settings, app), app, settings.timeouts.lame_duck_s)
    admin = create_admin_app(app, secrets, reader_of(arguments)) if admin_listener is not None else None
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _stop)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, listener, admin, admin_listener))
    return 0


def _tame_collector() -> None:
    """What is loaded by now lives as long as the process: keep the cycle collector from walking it again and again,
    which takes milliseconds in which no stream moves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Before uvicorn has taken the signals over, and when it raises them again after its orderly stop."""
    raise SystemExit(0)


def has_admin(settings: Settings) -> bool:
    """Is an admin listener wanted?"""
    return settings.listener.admin_port != 0


class Server(uvicorn.Server):
    """Says that it is draining before it stops listening."""

    def __init__(self, config: uvicorn.Config, app: ProxyApp, lame_duck_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._lame_duck_s = lame_duck_s
        self._leave_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish what is open, refuse new requests. SIGTERM goes on listening for `lame_duck_s` to say so; SIGINT, or a
        second signal, closes the listener at once, and one more SIGINT cuts what is open."""
        _log.info("draining: open answers are finished, new requests are refused")
        with contextlib.suppress(AttributeError):  # not started yet
            self._app.services.admission.draining = True
        if sig == signal.SIGTERM and self._lame_duck_s > 0 and self._leave_at is None and not self.should_exit:
            self._leave_at = time.monotonic() + self._lame_duck_s
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's own, ten times a second."""
        if self._leave_at is not None and not self.should_exit and time.monotonic() >= self._leave_at:
            super().handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)


async def _serve(
    server: Server, listener: socket.socket, admin_app: object | None, admin_listener: socket.socket | None
) -> None:
    if admin_app is None or admin_listener is None:
        await server.serve(sockets=[listener])
        return
    admin = uvicorn.Server(
        uvicorn.Config(admin_app, log_level="warning", access_log=False, lifespan="off")  # type: ignore[arg-type]
    )
    admin_task = asyncio.create_task(admin._serve(sockets=[admin_listener]), name="admin")
    try:
        await server.serve(sockets=[listener])
    finally:
        admin.should_exit = True
        await admin_task


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything says ready.

    Raises:
        OperatorError: the port is taken or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError, ValueError) as error:  # the latter two: what can be no port and no host
        listener.close()
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise OperatorError(f"cannot listen on {host}:{port}: {why}", "choose another host or port") from error
    return listener


def uvicorn_config(settings: Settings, app: ProxyApp) -> uvicorn.Config:
    """How uvicorn is run: fast parser and loop, no access log of its own, a bound on graceful stopping."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        log_level="info",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.timeouts.drain_s),
        ssl_certfile=settings.listener.tls_certificate or None,
        ssl_keyfile=settings.listener.tls_key or None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
