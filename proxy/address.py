"""Where an engine is: URLs and `host:port` texts, checked once and brought to one form. Pure.

What passes here can be put into a request and handed to a resolver without another error than "not reachable".
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

import msgspec

from ascend_pd.errors import OperatorError
from proxy.settings import InstanceSettings

MAX_PORT = 65535
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LONGEST_NAME = 253
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def canonical_host(host: str) -> str:
    """A host name in lower case, or an address, without brackets.

    Raises:
        ValueError: says what is wrong with it.
    """
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    name = host.lower()
    if not name.isascii():
        name = name.encode("idna").decode("ascii")
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"{host!r} is no host name")
    return name


def bracketed(host: str) -> str:
    """As it stands in a URL or before a port."""
    return f"[{host}]" if ":" in host else host


def check_port(port: int, what: str, least: int = 1) -> None:
    """Refuse what is no TCP port.

    Raises:
        OperatorError
    """
    if not least <= port <= MAX_PORT:
        raise OperatorError(f"{what} {port} is no port", f"give one from {least} to {MAX_PORT}")


def canonical_url(url: str, what: str) -> str:
    """`scheme://host[:port]`: one spelling for one place.

    Raises:
        OperatorError: no such URL, or more than that.
    """
    fix = "write http(s)://host:port and leave out /v1 and paths"
    try:
        parts = urlsplit(url)
        host, port = canonical_host(parts.hostname or ""), parts.port
    except ValueError as error:
        raise OperatorError(f"{what} {url!r} is not http(s)://host:port: {error}", fix) from error
    if not _is_bare(parts) or port == 0:
        raise OperatorError(f"{what} {url!r} is not http(s)://host:port", fix)
    shown = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{bracketed(host)}{shown}"


def _is_bare(parts: SplitResult) -> bool:
    extra = (parts.path.rstrip("/"), parts.query, parts.fragment)
    return parts.scheme in _DEFAULT_PORTS and not any(extra) and "@" not in parts.netloc


def check_base_url(url: str, what: str) -> None:
    """Refuse what is no `http(s)://host[:port][/path]`.

    Raises:
        OperatorError
    """
    try:
        place = urlsplit(url)._replace(path="", query="", fragment="").geturl()
    except ValueError as error:
        raise OperatorError(f"{what} {url!r} is no URL: {error}", "write http(s)://host:port") from error
    canonical_url(place, what)


def canonical_side(side: str, of: str) -> str:
    """`host:port` of a side channel.

    Raises:
        OperatorError
    """
    host, _, port = side.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= MAX_PORT):
            raise ValueError(f"{port!r} is no port")
        if ":" in host and plain == host:
            raise ValueError("an IPv6 address stands in brackets")
        return f"{bracketed(canonical_host(plain))}:{int(port)}"
    except ValueError as error:
        raise OperatorError(
            f"side channel {side!r} of {of} is not HOST:PORT: {error}", "write HOST:PORT"
        ) from error


def canonical_instance(instance: InstanceSettings) -> InstanceSettings:
    """The same instance in the one spelling that it is known by.

    Raises:
        OperatorError: naming the URL, the side channel or the rank.
    """
    url = canonical_url(instance.url, "instance URL")
    side = canonical_side(instance.side, url) if instance.side else ""
    if instance.dp_rank is not None and instance.dp_rank < 0:
        raise OperatorError(f"dp_rank {instance.dp_rank} of {url} is no rank", "count from 0, or leave it out")
    return msgspec.structs.replace(instance, url=url, side=side)
