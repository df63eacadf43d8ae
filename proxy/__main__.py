"""`python -m proxy`: load the settings, serve until told to stop."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence

import uvicorn

from ascend_pd.errors import OperatorError
from proxy.app import create_app
from proxy.load import load_settings
from proxy.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after an orderly stop, 2 when the settings or the port cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load_settings(argv)
        listener = bind(settings.host, settings.port)
    except OperatorError as error:
        print(f"proxy: {error}", file=sys.stderr)
        return 2
    server = uvicorn.Server(uvicorn_config(settings))
    server.run(sockets=[listener])
    return 0


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
    except OSError as error:
        listener.close()
        raise OperatorError(f"cannot listen on {host}:{port}: {error.strerror}", "choose another port") from error
    return listener


def uvicorn_config(settings: Settings) -> uvicorn.Config:
    """How uvicorn is run: fast parser and loop, no access log of its own, a bound on graceful stopping."""
    return uvicorn.Config(
        create_app(settings),
        loop="uvloop",
        http="httptools",
        log_level="info",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.timeouts.drain_s),
    )


if __name__ == "__main__":
    raise SystemExit(main())
