"""`ascend-pd demo`: the embedded default, end to end."""

from __future__ import annotations

import argparse
from pathlib import Path

from ascend_pd.embedded.demo import run_demo
from ascend_pd.launch.supervisor import READY_S
from ascend_pd.spec.cluster import Mode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.PULL.value,
        help="who moves the cache: decode pulls it, or prefill pushes it layer by layer (default: %(default)s)",
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="where logs go (default: logs/demo-MODE)")
    parser.add_argument(
        "--ready-timeout", type=float, default=READY_S, metavar="SECONDS", help="default: %(default)g"
    )


def run(args: argparse.Namespace) -> int:
    """Print what happens, the verdict last."""
    mode = Mode(args.mode)
    print(run_demo(mode, args.log_dir or Path("logs") / f"demo-{mode.value}", args.ready_timeout), flush=True)
    return 0
