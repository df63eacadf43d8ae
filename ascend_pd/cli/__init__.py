"""The command line: a table of commands, each a module that is imported only when its command is called.

A command module has `add_arguments(parser)` and `run(args) -> int` (the exit code); one that hands its arguments
on to another program has `forward(arguments) -> int` instead. It raises `OperatorError` for whatever the operator
can put right; that becomes one line on standard error and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, cast

from ascend_pd import __version__
from ascend_pd.errors import AscendPdError, OperatorError

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("ascend_pd.cli.check", "say whether a cluster file can work, and what to change"),
    "up": ("ascend_pd.cli.up", "start every role of a cluster file on this machine"),
    "engine": ("ascend_pd.cli.engine", "run or print one engine of a cluster file"),
    "manifests": ("ascend_pd.cli.manifests", "write Kubernetes YAML for a cluster file"),
    "model": ("ascend_pd.cli.model", "prepare the embedded demo model"),
    "demo": ("ascend_pd.cli.demo", "serve the embedded demo model and ask it one question, end to end"),
}
"""Command → its module and its one-line description, in the order of the help page."""

FORWARDED: dict[str, tuple[str, str]] = {
    "proxy": ("ascend_pd.cli.proxy", "run the OpenAI endpoint of a cluster file, or of engines named by URL"),
    "metaserver": ("ascend_pd.cli.metaserver", "run the rendezvous of layer-wise mode"),
}
"""The same for commands whose arguments belong to the program they start."""

INTERRUPTED = 130


class Command(Protocol):
    """What a command module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def _parser(wanted: str | None) -> tuple[argparse.ArgumentParser, Command | None]:
    """A parser that knows all commands by name, and the arguments of the wanted one only."""
    parser = argparse.ArgumentParser(
        prog="ascend-pd", description="Prefill/decode disaggregated serving for vLLM on Ascend NPUs."
    )
    parser.add_argument("--version", action="version", version=f"ascend-pd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module: Command | None = None
    for name, (path, description) in COMMANDS.items():
        child = commands.add_parser(
            name, help=description, description=f"{description[0].upper()}{description[1:]}."
        )
        if name == wanted:
            module = cast(Command, import_module(path))
            module.add_arguments(child)
    for name, (_, description) in FORWARDED.items():
        commands.add_parser(name, help=description)
    return parser, module


def report(error: AscendPdError) -> None:
    """One line on standard error: what is wrong and what to do about it."""
    fix = error.fix if isinstance(error, OperatorError) else ""
    message = error.message if isinstance(error, OperatorError) else str(error)
    print(f"ascend-pd: error: {message}{f' - {fix}' if fix else ''}", file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in FORWARDED:
        forward: Callable[[list[str]], int] = import_module(FORWARDED[arguments[0]][0]).forward
        return forward(arguments[1:])
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    parser, module = _parser(wanted)
    args = parser.parse_args(arguments)
    if module is None:
        parser.error("no command")
    return module.run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 it failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except AscendPdError as error:
        report(error)
        return 1
    except KeyboardInterrupt:
        print("ascend-pd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`); keep the interpreter's last flush from failing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
