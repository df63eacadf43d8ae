"""A process per test without its imports: a server has vLLM and torch imported and forks a child for each order.

A child is a process of its own: it has its own pipes and environment, opens its own endpoint and can be stopped and
killed. Forking is only sound from one thread, so the server refuses when it has more: what starts threads when it is
imported (Mooncake, which also reads the environment then) is left to the child. Nothing outlives the tests: the
server ends when the other end of its channel closes, kill -9 included, and every child ends with the server.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 120.0
"""An answer takes milliseconds; the first one waits for the imports."""
MAX_MESSAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The tests' end. Made and closed in one thread."""

    def __init__(self, *preload: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.fork_server", str(theirs.fileno()), *preload],
                cwd=ROOT,
                # OpenBLAS starts its threads when it is loaded.
                env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.settimeout(ANSWER_S)
        self._channel = ours

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def start(self, target: str, *arguments: str, env: Mapping[str, str]) -> Forked:
        """Call `target`, as `module:function`, with these arguments in a new process.

        Raises:
            RuntimeError: the server cannot fork, or is gone.
        """
        stdin, to_child = os.pipe()
        from_child, stdout = os.pipe()
        order = {"target": target, "arguments": arguments, "env": dict(env)}
        try:
            pid = self.ask(order, stdin, stdout, sys.__stderr__.fileno())  # type: ignore[union-attr]
        except BaseException:
            os.close(to_child)
            os.close(from_child)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        return Forked(self, pid, os.fdopen(to_child, "w"), os.fdopen(from_child))

    def ask(self, message: dict[str, Any], *descriptors: int) -> int:
        """The server's answer to one message."""
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
            data = self._channel.recv(MAX_MESSAGE_BYTES)
        except BrokenPipeError:
            data = b""
        if not data:
            raise RuntimeError(f"the fork server ended with {self._process.wait(ANSWER_S)}")
        answer = json.loads(data)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return int(answer["value"])

    def close(self) -> None:
        """End the server and every process it started."""
        self._channel.close()
        self._process.wait(ANSWER_S)


class Forked:
    """One process of the server's, used as a `subprocess.Popen`. Its number is its own until it was waited for."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self._server = server
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, -N when signal N ended it.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self.returncode is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            finally:
                os.close(ended)
            self.returncode = self._server.ask({"wait": self.pid})
        return self.returncode


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to be."""

    target: str
    arguments: list[str]
    env: dict[str, str]

    def carry_out(self, imported: Mapping[str, str], descriptors: list[int]) -> None:
        """Become it. `imported` is what the imports themselves have put into the environment."""
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.env)
        os.environ.update(imported)
        module, _, function = self.target.partition(":")
        getattr(import_module(module), function)(*self.arguments)


class Server:
    """The loop in the server process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._children: set[int] = set()

    def serve(self) -> tuple[Order, list[int]] | None:
        """Answer until the channel closes, then end all children. Returns an order in the child that it is for."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, 3)
            if not message:
                self._end_children()
                return None
            content = json.loads(message)
            if "wait" in content:
                _, status = os.waitpid(content["wait"], 0)
                self._children.remove(content["wait"])
                self._answer(value=os.waitstatus_to_exitcode(status))
                continue
            threads = sum(1 for _ in Path("/proc/self/task").iterdir())
            if threads != 1:
                self._answer(error=f"the fork server has {threads} threads: a child could find their locks taken")
            elif (pid := self._fork()) == 0:
                self._channel.close()
                return Order(**content), descriptors
            else:
                self._children.add(pid)
                self._answer(value=pid)
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, **fields: Any) -> None:
        self._channel.send(json.dumps(fields).encode())

    def _fork(self) -> int:
        """The child's number, once it is certain that it ends with this process; 0 in the child."""
        bound, bind = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(bound)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._pid:
                sys.exit("the fork server is gone")
        os.close(bind)
        if pid != 0:
            os.read(bound, 1)
            os.close(bound)
        return pid

    def _end_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    for name in sys.argv[2:]:
        import_module(name)
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # what is imported stays shared: no child's collector writes to it
    order = Server(channel).serve()
    if order is not None:
        order[0].carry_out(imported, order[1])


if __name__ == "__main__":
    main()
