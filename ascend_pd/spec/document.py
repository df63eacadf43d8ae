"""YAML text → plain data plus the line of every value, with a deliberately small YAML.

One document, YAML 1.2's core scalars (so `no` and `12:30` are text), no anchors, aliases, tags or merge keys,
no duplicate keys, bounded size and depth. Nothing is expanded, so nothing can explode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ascend_pd.spec.problems import Problem, SpecError, path_of

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_LONGEST_NUMBER = 40

Location = tuple[str | int, ...]


@dataclass
class Document:
    """Parsed data, where each value stands (1-based lines), and what was wrong without making it unreadable."""

    data: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, location: Location) -> int:
        """The line of a value, or of its nearest ancestor that is in the file."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


def scalar(text: str) -> Any:
    """A plain scalar under YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.match(text):
        return int(text)
    if _HEX.match(text):
        return int(text, 16)
    return float(text) if _FLOAT.match(text) else text


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


class _Builder:
    """Turns libyaml's events into data. Recursion is bounded by MAX_DEPTH."""

    def __init__(self, text: str) -> None:
        self.events = yaml.parse(text, Loader=_LOADER)
        self.document = Document()

    def problem(self, location: Location, line: int, message: str, fix: str) -> None:
        self.document.problems.append(Problem(path_of(location), line, message, fix))

    def build(self) -> Document:
        next(self.events)
        started = next(self.events)
        if isinstance(started, yaml.StreamEndEvent):
            raise SpecError.unusable("the file is empty", "write a PDCluster document, see deploy/examples/")
        self.document.data = self.value(next(self.events), ())
        next(self.events)
        if not isinstance(another := next(self.events), yaml.StreamEndEvent):
            line = _line(another)
            raise SpecError.unusable(f"a second document starts at line {line}", "put one cluster in one file")
        return self.document

    def value(self, event: Any, at: Location) -> Any:
        line = _line(event)
        self.document.lines.setdefault(at, line)
        if len(at) > MAX_DEPTH:
            raise SpecError.unusable(f"line {line} is nested deeper than {MAX_DEPTH} levels", "")
        if isinstance(event, yaml.AliasEvent):
            self.problem(at, line, f"alias *{event.anchor} is not supported", "write the value out")
            return None
        if event.anchor:
            self.problem(
                at, line, f"anchor &{event.anchor} is not supported", "write the value out where it is used"
            )
        if event.tag and not (isinstance(event, yaml.ScalarEvent) and event.tag == "!"):
            self.problem(at, line, f"tag {event.tag} is not supported", "remove it")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(at)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(at)
        return scalar(event.value) if event.implicit[0] else event.value

    def sequence(self, at: Location) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.value(event, (*at, len(items))))
        return items

    def mapping(self, at: Location) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise SpecError.unusable(f"line {line}: a key must be plain text", "")
            key = event.value
            if event.anchor:
                self.problem((*at, key), line, f"anchor &{event.anchor} is not supported", "remove it")
            repeated = key in found
            if repeated:
                first = self.document.lines[(*at, key)]
                self.problem((*at, key), line, f"{key} is given twice, first at line {first}", "keep one of them")
            else:
                self.document.lines[(*at, key)] = line
            value = self.value(next(self.events), (*at, key))
            if not repeated:
                found[key] = value
        return found


def parse_document(text: str) -> Document:
    """Read YAML text.

    Raises:
        SpecError: unusable: empty, not YAML, several documents, nested too deeply.
    """
    try:
        return _Builder(text).build()
    except yaml.reader.ReaderError as error:
        raise SpecError.unusable(
            f"not text: {error.reason} at position {error.position}", "is this the cluster file?"
        ) from error
    except UnicodeEncodeError as error:
        raise SpecError.unusable(f"not text: {error.reason} at position {error.start}", "") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown line"
        raise SpecError.unusable(f"not YAML: {where}: {error.problem}", "look at the indentation there") from error
