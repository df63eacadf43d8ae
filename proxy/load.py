"""Makes the settings object from the command line and a settings file; the one file of `proxy` that reads them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ascend_pd.errors import OperatorError
from proxy.dialects import DIALECTS
from proxy.policy import POLICIES
from proxy.settings import InstanceSettings, Settings

_FLAGS = ("host", "port", "mode", "dialect", "metaserver", "retries")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proxy", description="OpenAI endpoint for P/D engines")
    parser.add_argument(
        "--settings", metavar="FILE", help="JSON or YAML file with the fields of proxy.settings.Settings"
    )
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    instance_help = "base URL, optionally followed by ,side=HOST:PORT and ,dp_rank=N; repeatable"
    for role in ("prefill", "decode", "union"):
        parser.add_argument(f"--{role}", action="append", metavar="URL[,side=HOST:PORT]", help=instance_help)
    parser.add_argument("--mode", choices=("pull", "layerwise"))
    parser.add_argument("--dialect", choices=sorted(DIALECTS))
    parser.add_argument("--metaserver", metavar="URL")
    parser.add_argument("--retries", type=int)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of the settings, e.g. policy.prefill=round-robin; repeatable",
    )
    return parser


def parse_instance(text: str) -> InstanceSettings:
    """`http://host:port[,side=host:port][,dp_rank=N]` as an instance.

    Raises:
        OperatorError: not a URL, or an unknown option.
    """
    url, *options = text.split(",")
    fields: dict[str, Any] = {"url": url}
    for option in options:
        key, _, value = option.partition("=")
        fields[key] = int(value) if key == "dp_rank" and value.isdigit() else value
    try:
        return msgspec.convert(fields, InstanceSettings)
    except msgspec.ValidationError as error:
        raise OperatorError(f"instance {text!r}: {error}", "write URL[,side=HOST:PORT][,dp_rank=N]") from error


def _read_file(path: str) -> dict[str, Any]:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise OperatorError(f"settings file {path}: {error.strerror}", "give a readable file") from error
    try:
        content = msgspec.yaml.decode(raw)
    except msgspec.DecodeError as error:
        raise OperatorError(f"settings file {path}: {error}", "write it as JSON or YAML") from error
    if not isinstance(content, dict):
        raise OperatorError(f"settings file {path} holds no mapping", "see proxy.settings.Settings for the keys")
    return content


def set_field(fields: dict[str, Any], assignment: str) -> None:
    """Put `section.field=value` into the settings' plain form; a value that is no JSON is text.

    Raises:
        OperatorError: no assignment, or a section that is none.
    """
    path, equals, text = assignment.partition("=")
    *sections, name = path.split(".")
    if not equals or not name:
        raise OperatorError(f"--set {assignment!r} is no assignment", "write --set section.field=value")
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    for section in sections:
        fields = fields.setdefault(section, {})
        if not isinstance(fields, dict):
            raise OperatorError(f"--set {assignment!r}: {section} has no fields", "see proxy.settings.Settings")
    fields[name] = value


def load_settings(argv: Sequence[str] | None = None) -> Settings:
    """Command line over settings file over defaults.

    Raises:
        OperatorError: unknown key, wrong type, or a combination that cannot serve.
    """
    args = _parser().parse_args(argv)
    fields = _read_file(args.settings) if args.settings else {}
    for name in _FLAGS:
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    for assignment in args.set:
        set_field(fields, assignment)
    for role in ("prefill", "decode", "union"):
        if getattr(args, role) is not None:
            fields[role] = [msgspec.to_builtins(parse_instance(text)) for text in getattr(args, role)]
    try:
        settings = msgspec.convert(fields, Settings)
    except msgspec.ValidationError as error:
        raise OperatorError(f"proxy settings: {error}", "see proxy.settings.Settings for the keys") from error
    validate(settings)
    return settings


def validate(settings: Settings) -> None:
    """Refuse what cannot serve.

    Raises:
        OperatorError: naming the field and what to write.
    """
    if bool(settings.prefill) != bool(settings.decode):
        raise OperatorError("prefill and decode instances must be given together", "add --prefill and --decode")
    if not settings.prefill and not settings.union:
        raise OperatorError("no instances", "add --prefill URL --decode URL, or --union URL")
    for instance in (*settings.prefill, *settings.decode, *settings.union):
        _validate_instance(instance)
    if settings.dialect and settings.dialect not in DIALECTS:
        raise OperatorError(f"dialect {settings.dialect!r} is unknown", f"one of {', '.join(sorted(DIALECTS))}")
    if settings.mode not in ("pull", "layerwise"):
        raise OperatorError(f"mode {settings.mode!r} is unknown", "pull or layerwise")
    if settings.mode == "layerwise" and not settings.metaserver:
        raise OperatorError("layerwise mode needs a metaserver", "add --metaserver URL")
    for side, name in (("prefill", settings.policy.prefill), ("decode", settings.policy.decode)):
        if name not in POLICIES:
            raise OperatorError(f"policy.{side} {name!r} is unknown", f"one of {', '.join(sorted(POLICIES))}")


def _validate_instance(instance: InstanceSettings) -> None:
    parts = urlsplit(instance.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/"):
        raise OperatorError(f"instance URL {instance.url!r} is not http(s)://host:port", "leave out /v1 and paths")
    if instance.side and not instance.side.rpartition(":")[2].isdigit():
        raise OperatorError(f"side channel {instance.side!r} of {instance.url} is not HOST:PORT", "")
