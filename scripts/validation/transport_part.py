"""The transport part in a process of its own, with the environment that its library reads when it is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scripts.validation import transport
from scripts.validation.report import run_part


def main(hardware: str, first: str, second: str, config: str) -> int:
    """Print the part as one line."""
    part = run_part(
        "transport",
        lambda part: transport.run(part, hardware, json.loads(config), (int(first), int(second))),
        say=lambda line: None,
    )
    print("part " + json.dumps({"facts": part.facts, "checks": [asdict(check) for check in part.checks]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
