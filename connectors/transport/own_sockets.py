"""This process's own TCP sockets, found through /proc, where a library gives no handle on them.

Two things in Mooncake 0.3.13 wait without a way out, and both wait on a socket of this very process:

* the engine's destructor runs with the interpreter's lock held and joins a thread that sits in `accept` with a one
  second timeout: a fence would freeze the whole worker for a second. Shortening the timeout first makes it
  milliseconds.
* the first contact with a peer is a request on the peer's handshake port, answered by a thread of the peer. A peer
  that is stopped leaves it unanswered for 62 s, and opening a peer's segment holds the engine's lock, so transfers
  with every other peer wait as well. Shutting the connection down ends the wait at once.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def set_accept_timeout(host: str, port: int, seconds: float) -> bool:
    """On this process's listening socket of `port`; the `accept` under way is woken, so that it counts from now.

    False when the socket cannot be found (not Linux); nothing is lost then but time.
    """
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    found = False
    try:
        for listener in _sockets(port, listening=True):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            found = True
        if found:
            socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return found


def cut_connections(port: int) -> int:
    """Shut down this process's connections to `port` of whatever host. Returns how many there were."""
    count = 0
    for connection in _sockets(port, listening=False):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it ended by itself meanwhile
        count += 1
    return count


def _sockets(port: int, *, listening: bool) -> Iterator[socket.socket]:
    """Duplicates, closed after use, of the sockets that listen on `port` or are connected to it elsewhere."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _inodes(table, port, listening=listening)}
    if not inodes:
        return
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
            if target.startswith("socket:[") and target[8:-1] in inodes:
                duplicate = socket.socket(fileno=os.dup(int(path.name)))
            else:
                continue
        except OSError:
            continue
        with duplicate:
            yield duplicate


def _inodes(table: str, port: int, *, listening: bool) -> Iterator[str]:
    """Columns of the table: local address, remote address, state, …, inode as the tenth."""
    try:
        lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return
    for columns in (line.split() for line in lines):
        end = columns[1] if listening else columns[2]
        if int(end.rsplit(":", 1)[1], 16) == port and (columns[3] == _LISTEN) == listening:
            yield columns[9]
