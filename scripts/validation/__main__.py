"""`scripts/npu_validate.sh SPEC [--device cpu|npu]`: run the parts, write the report, say the verdict."""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_pd.errors import OperatorError
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.problems import SpecError
from scripts.validation.parts import PARTS, Site
from scripts.validation.report import render, run_part, write


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="npu_validate.sh", description=__doc__)
    parser.add_argument("spec", metavar="SPEC", type=Path, help="the cluster file")
    parser.add_argument("--device", choices=("npu", "cpu"), default="npu", help="default: npu")
    parser.add_argument("--only", default="", metavar="PARTS", help=f"of {','.join(PARTS)}; default: all")
    parser.add_argument("--report", type=Path, metavar="FILE", help="default: npu-report-<name>.json")
    parser.add_argument(
        "--pool", default="", help="the pool this machine belongs to, when its address does not tell"
    )
    parser.add_argument("--dies", default="0,1", metavar="A,B", help="the two NPUs of the transport part")
    parser.add_argument("--pd", default="", metavar="URL", help="a running P/D service, instead of starting one")
    parser.add_argument("--collocated", default="", metavar="URL", help="a running single engine, likewise")
    parser.add_argument("--ready-timeout", type=float, default=900.0, metavar="SECONDS")
    return parser.parse_args(argv)


def site_of(args: argparse.Namespace) -> tuple[str, Site, list[str]]:
    """The file's name, where to run, and which parts.

    Raises:
        OperatorError: the file is no cluster file, is for another device, or a part is unknown.
    """
    try:
        cluster = load_spec(args.spec)
    except SpecError as problem:
        raise OperatorError(f"{args.spec}: {problem}", "see ascend-pd check") from problem
    on_cpu = {pool.hardware.value == "cpu" for pool in cluster.spec.pools}
    if on_cpu != {args.device == "cpu"}:
        kinds = ", ".join(sorted({pool.hardware.value for pool in cluster.spec.pools}))
        raise OperatorError(
            f"{args.spec} is for {kinds}, not for --device {args.device}", "choose another of both"
        )
    names = [name for name in args.only.split(",") if name] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise OperatorError(f"no part {', '.join(unknown)}", f"parts are {', '.join(PARTS)}")
    first, _, second = args.dies.partition(",")
    if not (first.isdecimal() and second.isdecimal()):
        raise OperatorError(f"--dies {args.dies}", "two numbers, like 0,1")
    site = Site(
        spec=args.spec,
        device=args.device,
        pool=args.pool,
        ready_s=args.ready_timeout,
        pd_url=args.pd,
        collocated_url=args.collocated,
        dies=(int(first), int(second)),
    )
    return cluster.metadata.name, site, names


def main(argv: Sequence[str] | None = None) -> int:
    """0 all passed, 1 a part failed, 2 it could not be run."""
    args = arguments(argv)
    try:
        name, site, names = site_of(args)
    except OperatorError as error:
        print(f"npu_validate: error: {error}", file=sys.stderr)
        return 2
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    parts = [run_part(part, lambda found, part=part: PARTS[part](found, site)) for part in names]
    path = args.report or Path(f"npu-report-{name}.json")
    facts = {"started_at": began, "machine": platform.machine(), "python": platform.python_version()}
    write(path, render(name, args.device, parts, facts))
    failed = [part.name for part in parts if not part.passed]
    print(f"{'passed' if not failed else 'FAILED: ' + ', '.join(failed)}; the report is {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
