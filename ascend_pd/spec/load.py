"""Reading a cluster file from disk: the one I/O file of this package."""

from __future__ import annotations

from pathlib import Path

from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.document import MAX_BYTES
from ascend_pd.spec.parse import Parsed, parse_spec
from ascend_pd.spec.problems import SpecError


def read_spec_text(path: Path) -> str:
    """The text of a cluster file, never more than MAX_BYTES of it.

    Raises:
        SpecError: missing, not a regular file, unreadable, too large, not UTF-8.
    """
    if not path.exists():
        raise SpecError.unusable("no such file", "name a cluster file, see deploy/examples/")
    if path.is_fifo():
        raise SpecError.unusable("a pipe, which can be read only once", "write it to a file first, and name that")
    if not path.is_file():
        raise SpecError.unusable("not a regular file", "name a cluster file, see deploy/examples/")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError.unusable(f"cannot be read: {error.strerror}", "look at its permissions") from error
    if len(raw) > MAX_BYTES:
        raise SpecError.unusable(f"larger than {MAX_BYTES >> 20} MiB", "is this the cluster file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError.unusable(f"not UTF-8 text (byte {error.start})", "is this the cluster file?") from error


def load_parsed(path: str | Path) -> Parsed:
    """Read a cluster file, with the line of every value.

    Raises:
        SpecError: the file's name is in the message.
    """
    try:
        return parse_spec(read_spec_text(Path(path)))
    except SpecError as error:
        raise error.at(str(path)) from error.__cause__


def load_spec(path: str | Path) -> PDCluster:
    """Read a cluster file.

    Raises:
        SpecError: an OperatorError whose `problems` has all of them; the file's name is in the message.
    """
    return load_parsed(path).cluster
