"""Makes the settings object from the command line and files; the one module of `proxy` that reads them."""

from __future__ import annotations

import argparse
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ascend_pd.errors import OperatorError
from ascend_pd.secret import load_secret
from ascend_pd.spec.cluster import Role as PoolRole
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import Engine, derive_topology
from proxy.address import bracketed, canonical_instance, check_base_url, check_port
from proxy.auth import Key, parse_keys
from proxy.dialects import DIALECTS
from proxy.policy import POLICIES
from proxy.services import Secrets
from proxy.settings import InstanceSettings, Role, Settings

_FLAGS = ("host", "port", "mode", "dialect", "metaserver", "retries", "secret_file")
_NESTED = {
    "policy_prefill": ("policy", "prefill"),
    "policy_decode": ("policy", "decode"),
    "fallback": ("policy", "fallback"),
    "api_key_file": ("listener", "api_key_file"),
    "admin_port": ("listener", "admin_port"),
    "admin_key_file": ("listener", "admin_key_file"),
    "tls_certificate": ("listener", "tls_certificate"),
    "tls_key": ("listener", "tls_key"),
    "debug_records": ("observability", "expose_records"),
    "otlp_endpoint": ("observability", "otlp_endpoint"),
}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proxy",
        description="One OpenAI endpoint for P/D engines. Flags go over --settings, which goes over --spec.",
    )
    parser.add_argument("--spec", metavar="FILE", help="cluster file: instances, mode, metaserver, addresses")
    parser.add_argument("--reload-spec", metavar="FILE", help="what /reload reads in place of --spec's file")
    parser.add_argument(
        "--settings", metavar="FILE", help="JSON or YAML with the fields of proxy.settings.Settings"
    )
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    instance_help = "base URL, optionally with ,side=HOST:PORT ,dp_rank=N ,dialect=NAME; repeatable"
    for role in ("prefill", "decode", "union"):
        parser.add_argument(f"--{role}", action="append", metavar="URL[,side=HOST:PORT]", help=instance_help)
    parser.add_argument("--mode", choices=("pull", "layerwise"))
    parser.add_argument("--dialect", choices=sorted(DIALECTS))
    parser.add_argument("--metaserver", metavar="URL")
    parser.add_argument("--retries", type=int)
    parser.add_argument("--secret-file", metavar="FILE", help="shared secret of side channel and metaserver")
    parser.add_argument("--policy-prefill", choices=sorted(POLICIES))
    parser.add_argument("--policy-decode", choices=sorted(POLICIES))
    parser.add_argument("--fallback", choices=("union", "local", "none"), help="who serves when P or D is down")
    parser.add_argument("--api-key-file", metavar="FILE")
    parser.add_argument("--admin-port", type=int)
    parser.add_argument("--admin-key-file", metavar="FILE")
    parser.add_argument("--tls-certificate", metavar="FILE")
    parser.add_argument("--tls-key", metavar="FILE")
    parser.add_argument("--otlp-endpoint", metavar="URL", help="OpenTelemetry collector (OTLP over HTTP)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of the settings, e.g. admission.max_running=100; repeatable",
    )
    parser.add_argument(
        "--debug-records", action="store_const", const=True, help="/debug/records on the public listener as well"
    )
    return parser


def parse_instance(text: str) -> InstanceSettings:
    """`http://host:port[,side=host:port][,dp_rank=N][,dialect=name]` as an instance.

    Raises:
        OperatorError: not a URL, or an unknown option.
    """
    url, *options = text.split(",")
    fields: dict[str, Any] = {"url": url}
    for option in options:
        key, _, value = option.partition("=")
        fields[key] = int(value) if key == "dp_rank" and value.isascii() and value.isdigit() else value
    try:
        return msgspec.convert(fields, InstanceSettings)
    except msgspec.ValidationError as error:
        raise OperatorError(
            f"instance {text!r}: {error}", "write URL[,side=HOST:PORT][,dp_rank=N][,dialect=NAME]"
        ) from error


def _read_file(path: str) -> dict[str, Any]:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise OperatorError(f"settings file {path}: {error.strerror}", "give a readable file") from error
    try:
        content = msgspec.yaml.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise OperatorError(
            f"settings file {path}: {' '.join(str(error).split())}", "write it as JSON or YAML"
        ) from error
    if not isinstance(content, dict):
        raise OperatorError(f"settings file {path} holds no mapping", "see proxy.settings.Settings for the keys")
    return content


def fields_of_spec(path: str) -> dict[str, Any]:
    """What a cluster file says about its proxy.

    Raises:
        OperatorError: not a usable cluster file.
    """
    cluster = load_spec(path)
    topology = derive_topology(cluster)
    spec = cluster.spec
    fields: dict[str, Any] = {
        "host": topology.proxy.host,
        "port": topology.proxy.port,
        "mode": spec.connector.mode.value,
        "secret_file": spec.connector.secret_file or "",
        "policy": {"prefill": spec.proxy.policy.prefill, "decode": spec.proxy.policy.decode},
        "listener": {
            "api_key_file": spec.proxy.api_key_file or "",
            "admin_key_file": spec.proxy.admin_key_file or "",
        },
    }
    if topology.metaserver is not None:
        fields["metaserver"] = topology.metaserver.url
    if topology.admin is not None:
        fields["listener"] |= {"admin_host": topology.admin.host, "admin_port": topology.admin.port}
    for role in PoolRole:
        fields[role.value] = [
            {"url": engine.url, "side": _side(engine) if role is not PoolRole.UNION else ""}
            for engine in topology.engines_of(role)
        ]
    return fields


def _side(engine: Engine) -> str:
    return f"{bracketed(engine.host)}:{engine.side_channel_port}"


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


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
    """Command line over settings file over cluster file over defaults.

    Raises:
        OperatorError: unknown key, wrong type, or a combination that cannot serve.
    """
    args = _parser().parse_args(argv)
    if args.reload_spec and not args.spec:
        raise OperatorError("--reload-spec without --spec", "name the cluster file to start with by --spec")
    return _settings_of(args, args.spec)


def reader_of(argv: Sequence[str] | None = None) -> Callable[[], Settings] | None:
    """Reads the files that this command line names once more; None when it names none."""
    args = _parser().parse_args(argv)
    spec = args.reload_spec or args.spec
    return (lambda: _settings_of(args, spec)) if spec or args.settings else None


def _settings_of(args: argparse.Namespace, spec: str | None) -> Settings:
    fields = fields_of_spec(spec) if spec else {}
    if args.settings:
        fields = _merge(fields, _read_file(args.settings))
    given: dict[str, Any] = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    for flag, (group, name) in _NESTED.items():
        if getattr(args, flag) is not None:
            given.setdefault(group, {})[name] = getattr(args, flag)
    for assignment in args.set:
        set_field(given, assignment)
    for role in ("prefill", "decode", "union"):
        if getattr(args, role) is not None:
            given[role] = [msgspec.to_builtins(parse_instance(text)) for text in getattr(args, role)]
    try:
        settings = msgspec.convert(_merge(fields, given), Settings)
    except msgspec.ValidationError as error:
        raise OperatorError(f"proxy settings: {error}", "see proxy.settings.Settings for the keys") from error
    validate(settings)
    return _checked_instances(settings)


def load_secrets(settings: Settings) -> Secrets:
    """Read the files that the settings name.

    Raises:
        OperatorError: one cannot be read, or is not what it should be.
    """
    listener = settings.listener
    _try_certificate(listener.tls_certificate, listener.tls_key)
    return Secrets(
        side_channel=load_secret(settings.secret_file),
        keys=_load_keys(listener.api_key_file),
        admin_keys=_load_keys(listener.admin_key_file),
        engine_key=load_secret(listener.engine_key_file).decode("ascii", "replace"),
    )


def _try_certificate(certificate: str, key: str) -> None:
    if not certificate:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise OperatorError(
            f"TLS certificate {certificate} with key {key}: {error.strerror or error}", "give a matching PEM pair"
        ) from error


def _load_keys(path: str) -> tuple[Key, ...]:
    if not path:
        return ()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"key file {path}: {error}", "python -m proxy.auth NAME >> FILE makes one") from error
    return parse_keys(text, path)


def validate(settings: Settings) -> None:
    """Refuse what cannot serve.

    Raises:
        OperatorError: naming the field and what to write.
    """
    if bool(settings.prefill) != bool(settings.decode):
        raise OperatorError("prefill and decode instances must be given together", "add --prefill and --decode")
    if not settings.prefill and not settings.union:
        raise OperatorError("no instances", "add --prefill URL --decode URL, or --union URL")
    if settings.mode not in ("pull", "layerwise"):
        raise OperatorError(f"mode {settings.mode!r} is unknown", "pull or layerwise")
    if settings.dialect and settings.dialect not in DIALECTS:
        raise OperatorError(f"dialect {settings.dialect!r} is unknown", f"one of {', '.join(sorted(DIALECTS))}")
    check_dialects(settings, (*settings.prefill, *settings.decode, *settings.union))
    for side, name in (("prefill", settings.policy.prefill), ("decode", settings.policy.decode)):
        if name not in POLICIES:
            raise OperatorError(f"policy.{side} {name!r} is unknown", f"one of {', '.join(sorted(POLICIES))}")
    if settings.policy.fallback not in ("union", "local", "none"):
        raise OperatorError(f"policy.fallback {settings.policy.fallback!r} is unknown", "union, local or none")
    _check_listener(settings)


def _check_listener(settings: Settings) -> None:
    listener = settings.listener
    check_port(settings.port, "port", least=0)
    check_port(listener.admin_port, "admin port", least=0)
    for url, what in (
        (settings.metaserver, "metaserver"),
        (settings.observability.otlp_endpoint, "OTLP endpoint"),
    ):
        if url:
            check_base_url(url, what)
    if bool(listener.tls_certificate) != bool(listener.tls_key):
        raise OperatorError("TLS needs a certificate and a key", "give --tls-certificate and --tls-key")
    if listener.admin_port and not listener.admin_key_file and listener.admin_host not in _LOOPBACK:
        raise OperatorError(
            f"the admin listener on {listener.admin_host} needs a key",
            "give --admin-key-file, or listen on 127.0.0.1",
        )


def checked_instance(instance: InstanceSettings) -> InstanceSettings:
    """The instance in the one spelling that it is known by.

    Raises:
        OperatorError: it is none; names the URL, the side channel, the rank or the dialect.
    """
    if instance.dialect and instance.dialect not in DIALECTS:
        raise OperatorError(
            f"dialect {instance.dialect!r} of {instance.url} is unknown", f"one of {', '.join(sorted(DIALECTS))}"
        )
    return canonical_instance(instance)


def check_dialects(settings: Settings, instances: Iterable[InstanceSettings]) -> None:
    """Refuse layer-wise instances where no metaserver is known.

    Raises:
        OperatorError
    """
    own = settings.dialect or settings.mode
    if {own, *(i.dialect for i in instances)} & {"layerwise", "ascend-layerwise"} and not settings.metaserver:
        raise OperatorError(
            "layer-wise handoffs need a metaserver",
            "add --metaserver URL (for ascend-layerwise: this proxy's own URL, as the engines reach it)",
        )


def _checked_instances(settings: Settings) -> Settings:
    checked: dict[str, tuple[InstanceSettings, ...]] = {}
    for role in Role:
        members = checked[role] = tuple(checked_instance(i) for i in getattr(settings, role))
        places = Counter((i.url, i.dp_rank) for i in members)
        twice = next((url for (url, _), times in places.items() if times > 1), None)
        if twice is not None:
            raise OperatorError(f"the {role} instance {twice} is given twice", "name it once")
    return msgspec.structs.replace(settings, **checked)
