"""Text → PDCluster, with every mistake reported at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ascend_pd.spec.cluster import API_VERSION, KIND, PDCluster
from ascend_pd.spec.document import Document, Location, parse_document
from ascend_pd.spec.problems import Problem, SpecError, expectation, nearest, path_of, unknown_key_fix


@dataclass(frozen=True)
class Parsed:
    """A cluster file that is well formed, and where each of its values stands."""

    cluster: PDCluster
    document: Document
    text: str


def parse_spec(text: str) -> Parsed:
    """Read a cluster file's text.

    Raises:
        SpecError: with all problems; `is_cluster` is False when it is no PDCluster document at all.
    """
    document = parse_document(text)
    _require_cluster(document.data)
    try:
        cluster = PDCluster.model_validate(document.data)
    except ValidationError as error:
        found = [_problem(dict(e), document) for e in error.errors(include_url=False)]
        problems = sorted([*document.problems, *found], key=lambda p: p.line)
        raise SpecError(problems, is_cluster=True) from None
    if document.problems:
        raise SpecError(document.problems, is_cluster=True)
    return Parsed(cluster, document, text)


def _require_cluster(data: Any) -> None:
    if not isinstance(data, dict):
        raise SpecError.unusable("not a PDCluster: the document is not a mapping", "see deploy/examples/")
    kind, version = data.get("kind"), data.get("apiVersion")
    if kind == KIND and version == API_VERSION:
        return
    if kind == KIND:
        raise SpecError.unusable(
            f"apiVersion is {version!r}, this version reads {API_VERSION}", f"write apiVersion: {API_VERSION}"
        )
    if isinstance(kind, str) and (version == API_VERSION or nearest(kind, [KIND])):
        raise SpecError.unusable(f"kind is {kind!r}, not {KIND}", f"write kind: {KIND}")
    raise SpecError.unusable(
        f"not a PDCluster: kind is {kind!r}, apiVersion is {version!r}",
        f"write apiVersion: {API_VERSION}, kind: {KIND}",
    )


def _problem(error: dict[str, Any], document: Document) -> Problem:
    location: Location = tuple(error["loc"])
    if location and location[-1] == "[key]":
        location = location[:-1]
        message, fix = f"{error['input']!r} is not a variable name", ""
    elif error["type"] == "extra_forbidden":
        key = str(location[-1])
        known = _keys(_model_at(location[:-1]))
        elsewhere = list(_everywhere().get(key, ()))
        message, fix = f"unknown key {key}", unknown_key_fix(key, known, elsewhere)
    else:
        message, fix = expectation(error)
    if error["type"] == "missing":
        message = f"{location[-1]} {message}"
    return Problem(path_of(location), document.line_of(location), message, fix)


def _keys(model: type[BaseModel] | None) -> list[str]:
    return [f.alias or name for name, f in model.model_fields.items()] if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model class inside `X`, `X | None`, `Annotated[tuple[X, ...], …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, UnionType) or get_args(annotation):
        for inner in get_args(annotation):
            if found := _model_in(inner):
                return found
    return None


def _model_at(location: Location) -> type[BaseModel] | None:
    model: type[BaseModel] | None = PDCluster
    for part in location:
        if isinstance(part, int):
            continue
        fields = {f.alias or name: f for name, f in model.model_fields.items()} if model else {}
        model = _model_in(fields[part].annotation) if part in fields else None
    return model


@cache
def _everywhere() -> dict[str, tuple[str, ...]]:
    """Key → the paths of the mappings that have it."""
    found: dict[str, tuple[str, ...]] = {}

    def walk(model: type[BaseModel], path: str) -> None:
        for name, info in model.model_fields.items():
            key = info.alias or name
            found[key] = (*found.get(key, ()), path)
            if inner := _model_in(info.annotation):
                many = "tuple" in str(info.annotation)
                walk(inner, f"{path}.{key}{'[]' if many else ''}")

    walk(PDCluster, "$")
    return found
