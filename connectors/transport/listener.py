"""Making the end of a Mooncake endpoint quick.

The engine's destructor runs with the interpreter's lock held and joins a thread that sits in `accept` with a one
second timeout (mooncake 0.3.13, P2P handshake), so a fence would freeze the whole worker for a second. The timeout
is a socket option of a socket of this process: shortened first, the destructor takes a few milliseconds.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_LISTEN = "0A"


def set_accept_timeout(host: str, port: int, seconds: float) -> bool:
    """On this process's listening socket of `port`; the `accept` under way is woken, so that it counts from now.

    False when the socket cannot be found (not Linux); nothing is lost then but time.
    """
    descriptor = _listener(port)
    if descriptor is None:
        return False
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _listener(port: int) -> int | None:
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    try:
        descriptors = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return None
    for path in descriptors:
        try:
            target = str(path.readlink())
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            return int(path.name)
    return None


def _listening_inodes(table: str, port: int) -> list[str]:
    """Inodes of the listening sockets of `port`, from /proc's table (local address, state and inode by column)."""
    try:
        lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    columns = [line.split() for line in lines]
    return [c[9] for c in columns if c[3] == _LISTEN and int(c[1].rsplit(":", 1)[1], 16) == port]
