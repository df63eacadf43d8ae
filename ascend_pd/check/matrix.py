"""Known combinations of versions: data, with its sources.

Sources: the release compatibility matrix in vllm-ascend's versioning policy (documentation of v0.23.0); HDK
floors from vllm-ascend's feature notes and Mooncake's Ascend direct transport page. Post releases of vllm-
ascend share their base's row.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_pd.versions import ADAPTERS


@dataclass(frozen=True, slots=True)
class Release:
    """One release of vllm-ascend and what it was built and tested with."""

    vllm_ascend: str
    vllm: str
    cann: str
    torch_npu: str
    mooncake: str
    """Empty where the release names none."""


RELEASES = (
    Release("0.23.0", "0.23.0", "9.1.0", "2.10.0.post4", "0.3.11.post1"),
    Release("0.23.0rc1", "0.23.0", "9.0.1", "2.10.0.post2", "0.3.11.post1"),
    Release("0.22.1rc1", "0.22.1", "9.0.0", "2.10.0", "0.3.9"),
    Release("0.21.0rc1", "0.21.0", "9.0.0", "2.10.0", "0.3.9"),
    Release("0.20.2rc1", "0.20.2", "9.0.0", "2.10.0", "0.3.8.post1"),
    Release("0.19.1rc1", "0.19.1", "8.5.1", "2.9.0", "0.3.8.post1"),
    Release("0.18.0", "0.18.0", "8.5.1", "2.9.0.post1", "0.3.9"),
)

SUPPORTED_VLLM = tuple(ADAPTERS)
"""Minor versions of vLLM that the connectors have an adapter for (0.32 on CPU)."""

DRIVER_FLOOR = {"A2": "25.5", "A3": "25.5"}
"""Lowest HDK (driver) recommended with the releases above."""
FABRIC_DRIVER_FLOOR = "26.0"
"""For fabric memory on A3; 25.5 with Mooncake 0.3.11 or newer."""
MOONCAKE_TCP_FLOOR = "0.3.13"
"""First Mooncake whose TCP writes are acknowledged after they landed, and which pools connections by default."""
DEBIAN_OF_LIBRARY = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "librdmacm.so.1": "librdmacm1"}
"""Shared libraries that Mooncake's module needs, and the Debian packages that have them."""


def base_version(version: str) -> str:
    """Without a leading v, a post release or a local part: `v0.23.0.post1+g1` → `0.23.0`."""
    return version.lower().removeprefix("v").partition("+")[0].partition(".post")[0]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers, for ordering: `9.1.0` → (9, 1, 0), `26.0.rc1` → (26, 0)."""
    found = []
    for part in version.lower().removeprefix("v").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def release(vllm_ascend: str) -> Release | None:
    """The row of a release; a post release has its base's."""
    return next((row for row in RELEASES if row.vllm_ascend == base_version(vllm_ascend)), None)
