"""`python -m metaserver`: bind, serve until told to stop. Exit code 0 after a signal, 2 for bad input."""

from __future__ import annotations

import argparse
import logging
import resource
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ascend_pd.errors import OperatorError
from ascend_pd.secret import load_secret
from metaserver.app import Metaserver, create_app
from metaserver.settings import Settings

logger = logging.getLogger("metaserver")

_BACKLOG = 4096


class _Server(uvicorn.Server):
    """Ends the long polls when told to stop, so that stopping takes no longer than answering them."""

    def __init__(self, config: uvicorn.Config, metaserver: Metaserver) -> None:
        super().__init__(config)
        self._metaserver = metaserver

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._metaserver.rendezvous.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal once more after an orderly stop: to be stopped is not a failure.
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OperatorError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, ValueError) as error:  # the latter two: what can be no port and no host
        fix = "choose another --port or stop what listens there, and give an address of this machine as --host"
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise OperatorError(f"cannot listen on {host}:{port}: {why}", fix) from error


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m metaserver", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="0 takes a free one (default %(default)s)")
    parser.add_argument("--secret-file", default="", help="shared secret; without it nobody is authenticated")
    parser.add_argument(
        "--max-reservations",
        type=int,
        default=defaults.max_reservations,
        help="posts beyond are answered 503 (default %(default)s)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="default %(default)s"
    )
    return parser.parse_args(argv)


def _raise_file_limit() -> None:
    # One descriptor per long poll: the usual soft limit of 1024 would be the bound on prefills in flight.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 17 if hard == resource.RLIM_INFINITY else min(hard, 1 << 17)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    """How uvicorn is run."""
    return uvicorn.Config(
        app,
        http="h11",  # bounds the headers (64 KiB), which httptools does not
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
    )


def main(argv: list[str] | None = None) -> int:
    """Serve; returns the exit code."""
    arguments = _arguments(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings(secret=load_secret(arguments.secret_file), max_reservations=arguments.max_reservations)
        listener = bind(arguments.host, arguments.port)
    except OperatorError as error:
        print(f"metaserver: {error}", file=sys.stderr)
        return 2
    _raise_file_limit()
    app = create_app(settings)
    host, port = listener.getsockname()[:2]
    authenticated = "authenticated" if settings.secret else "NOT authenticated: no --secret-file"
    logger.info("metaserver ready on %s:%d, %s", host, port, authenticated)
    _Server(uvicorn_config(app), app.state.metaserver).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
