"""Reading `extraArgs` the way vLLM's argparse will: which flags are there, and with which value."""

from __future__ import annotations

from collections.abc import Sequence

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-q": "--quantization",
}


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Flag → value (empty for a switch). Underscores are dashes, short flags spelled out, the last one wins."""
    found: dict[str, str] = {}
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        if not equals and index < len(arguments) and not _is_flag(arguments[index]):
            value = arguments[index]
            index += 1
        name = SHORT.get(name, name)
        head, dot, tail = name.partition(".")  # --speculative-config.method=mtp
        found[head.replace("_", "-") + dot + tail] = value
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdecimal()
