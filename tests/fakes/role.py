"""A role that is no engine: answers /health after a while, can fail, can leave a child that ignores SIGTERM.

python -m tests.fakes.role PORT [--ready-after S] [--exit-after S] [--code N] [--say TEXT] [--child]
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from ascend_pd.launch.plan import Kind, ProcessPlan

_DEAF = ["sh", "-c", "trap '' TERM; exec sleep 600"]
ROOT = Path(__file__).resolve().parents[2]


def role_plan(name: str, *options: str, kind: Kind = Kind.ENGINE) -> ProcessPlan:
    """A plan that starts this module on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    argv = (sys.executable, "-m", "tests.fakes.role", str(port), *options)
    return ProcessPlan(name, kind, argv, {"PYTHONPATH": str(ROOT)}, "127.0.0.1", port, ports=(port,))


def pids_in(log: Path) -> list[int]:
    """The role's and its child's process ids, from what the role wrote."""
    return [int(pid) for pair in re.findall(r"child (\d+) of (\d+)", log.read_text()) for pid in pair]


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--exit-after", type=float)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--say", default="")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.say:
        print(args.say, flush=True)
    if args.child:
        child = subprocess.Popen(_DEAF, start_new_session=True)
        print(f"child {child.pid} of {os.getpid()}", flush=True)
    if args.exit_after is not None:
        threading.Timer(args.exit_after, os._exit, [args.code]).start()
    time.sleep(args.ready_after)
    HTTPServer(("127.0.0.1", args.port), _Health).serve_forever()


if __name__ == "__main__":
    main()
