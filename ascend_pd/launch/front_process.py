"""Starting the proxy or the metaserver in place of this process: signals and exit codes need no middleman."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ascend_pd.errors import OperatorError
from ascend_pd.launch.preconditions import require_our_packages


def split_spec(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The cluster file, which comes first when there is one, and the remaining arguments."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def become(package: str, arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Replace this process by `python -m package arguments`.

    Raises:
        OperatorError: the package is not ours, or the interpreter cannot be started.
    """
    require_our_packages()
    try:
        os.execve(sys.executable, [sys.executable, "-m", package, *arguments], {**os.environ, **env})
    except OSError as error:
        raise OperatorError(f"cannot start {package}: {error.strerror}") from error
