"""What is wrong with a cluster file, said so that it can be put right: path, line, expectation, nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_pd.errors import OperatorError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong. `line` is 1-based; 0 means the file as a whole."""

    path: str
    line: int
    message: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}, {self.path}" if self.line else self.path
        return f"{where}: {self.message}"


class SpecError(OperatorError):
    """The file cannot be used as it is.

    `is_cluster` tells a PDCluster document with mistakes (findings, exit 1) from something that is none (exit 2).
    """

    def __init__(self, problems: Sequence[Problem], *, is_cluster: bool, source: str = "") -> None:
        self.problems = tuple(problems)
        self.is_cluster = is_cluster
        self.source = source
        first = self.problems[0]
        text = f"{first.message}" if first.path == "$" and not first.line else str(first)
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        prefix = f"{source}: " if source else ""
        super().__init__(f"{prefix}{text}{more}", first.fix)

    @classmethod
    def unusable(cls, message: str, fix: str) -> SpecError:
        """Not a cluster file at all."""
        return cls([Problem("$", 0, message, fix)], is_cluster=False)

    def at(self, source: str) -> SpecError:
        """The same error with the file's name."""
        return SpecError(self.problems, is_cluster=self.is_cluster, source=source)


def path_of(location: Iterable[str | int]) -> str:
    """`("spec", "pools", 0)` → `$.spec.pools[0]`."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def location_of(path: str) -> tuple[str | int, ...]:
    """The inverse of `path_of`, for paths whose keys have neither dots nor brackets."""
    parts: list[str | int] = []
    for word in path.removeprefix("$").replace("[", ".[").split("."):
        if word.startswith("["):
            parts.append(int(word.strip("[]")))
        elif word:
            parts.append(word)
    return tuple(parts)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` most likely means, or empty."""
    by_lower = {name.lower().replace("_", "").replace("-", ""): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("_", "").replace("-", ""), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""


def unknown_key_fix(key: str, known: Sequence[str], elsewhere: Sequence[str]) -> str:
    """Advice for an unknown key: the nearest sibling, else where the key belongs, else what is allowed."""
    if close := nearest(key, known):
        return f"did you mean {close}?"
    if elsewhere:
        return f"{key} belongs in {' or '.join(elsewhere)}"
    return f"known keys: {', '.join(known)}"


_EXPECTATIONS = {
    "missing": "is required and missing",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
}
_WHOLE = {
    "devices": "lower replicas or parallel sizes",
    "pools": "add a prefill and a decode pool, or a union pool",
}
_PATTERNS = {
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "a name of lower-case letters, digits and dashes, 63 at most",
    r"^[0-9A-Za-z_.:-]+$": "a host name or address",
}


def expectation(error: dict[str, Any]) -> tuple[str, str]:
    """Message and fix for one of pydantic's errors (`ValidationError.errors()`), unknown keys excepted."""
    kind, given = error["type"], error["input"]
    if kind == "missing":
        return _EXPECTATIONS[kind], f"add {error['loc'][-1]}"
    shown = "nothing" if given is None else _shown(given)
    if kind == "string_type" and isinstance(given, bool | int | float):
        return f"must be text, not {shown}", "put it in quotes"
    if kind in _EXPECTATIONS:
        return f"{_EXPECTATIONS[kind]}, not {shown}", ""
    if kind in ("literal_error", "enum"):
        allowed = [word.strip("' ") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        close = nearest(given, allowed) if isinstance(given, str) else ""
        fix = f"did you mean {close}?" if close else ""
        return f"must be one of {', '.join(allowed)}, not {shown}", fix
    if kind in _WHOLE:
        return error["msg"], _WHOLE[kind]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {error['ctx'][key]:.12g}, not {shown}", ""
    if kind == "string_too_short":
        return "must not be empty", ""
    if kind == "string_pattern_mismatch":
        return f"{shown} is not {_PATTERNS.get(error['ctx']['pattern'], error['ctx']['pattern'])}", ""
    return f"{shown}: {error['msg'][0].lower()}{error['msg'][1:]}", ""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
