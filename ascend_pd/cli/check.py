"""`ascend-pd check`: can this cluster work, and if not, why, and what to change."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ascend_pd.check.judge import judge, subject_of
from ascend_pd.check.outcome import ExitCode, Outcome, outcome_of_error, outcome_of_findings, overall
from ascend_pd.check.report_json import render_json
from ascend_pd.check.report_text import print_coloured, render_plain
from ascend_pd.errors import OperatorError
from ascend_pd.spec.load import load_parsed
from ascend_pd.spec.problems import SpecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("specs", metavar="SPEC", nargs="+", help="cluster files")
    parser.add_argument(
        "--depth",
        choices=("static", "host"),
        default="static",
        help="static: the files; host: this node, too",
    )
    parser.add_argument("--pool", default="", help="with --depth host: the pool this node belongs to")
    parser.add_argument("--replica", type=int, default=0, help="with --depth host: which replica of it")
    parser.add_argument("--node", type=int, default=0, help="with --depth host: which node of the replica")
    parser.add_argument(
        "--peer", action="append", default=[], help="a device address of another node to ping; may be repeated"
    )
    parser.add_argument("--save-facts", metavar="FILE", help="with --depth host: keep what was seen as JSON")
    parser.add_argument("--facts", metavar="FILE", help="judge what was saved on another host")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--strict", action="store_true", help="exit 1 for warnings and for what is unknown, too")


def check_file(path: str, args: argparse.Namespace) -> Outcome:
    """Judge one file and, when asked, this host; unusable when the host's part cannot be done."""
    try:
        parsed = load_parsed(Path(path))
    except SpecError as problem:
        return outcome_of_error(path, problem)
    subject = subject_of(parsed.cluster)
    findings = judge(subject)
    image: dict[str, str] = {}
    if args.depth == "host" or args.facts:
        from ascend_pd.check.host.judge import host_findings  # psutil and the tools: only when asked

        try:
            found, image = host_findings(subject, args)
        except OperatorError as problem:
            return Outcome(path, unusable=f"{path}: {problem}")
        findings += found
    return outcome_of_findings(path, findings, subject, parsed.document, image)


def _host_options_without_host(args: argparse.Namespace) -> str:
    """The first option that would be ignored, or empty."""
    if args.depth == "host":
        return ""
    given = {"--pool": args.pool, "--peer": args.peer, "--save-facts": args.save_facts}
    return next((name for name, value in given.items() if value), "")


def run(args: argparse.Namespace) -> int:
    """0 good or warnings only, 1 errors, 2 unusable input."""
    if stray := _host_options_without_host(args):
        print(f"ascend-pd: error: {stray} needs --depth host", file=sys.stderr)
        return ExitCode.UNUSABLE
    outcomes = [check_file(path, args) for path in args.specs]
    for outcome in outcomes:
        if outcome.unusable:
            print(f"ascend-pd: error: {outcome.unusable}", file=sys.stderr)
    if args.format == "json":
        print(render_json(outcomes, strict=args.strict))
    elif sys.stdout.isatty():
        print_coloured([o for o in outcomes if not o.unusable], strict=args.strict)
    else:
        usable = [o for o in outcomes if not o.unusable]
        print(render_plain(usable, strict=args.strict), end="\n" if usable else "")
    return int(overall(outcomes, strict=args.strict))
