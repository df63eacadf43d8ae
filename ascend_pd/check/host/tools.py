"""Reading what `npu-smi` and `hccn_tool` print. Exit codes are not looked at: both print failures with exit
code 0.

Output formats: Huawei's HDK documentation of npu-smi and hccn_tool for Atlas A2 and A3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = r"(\d{1,3}(?:\.\d{1,3}){3})"
_PING = re.compile(r"(\d+)\s+packets?\s+transmitted,\s*(\d+)\s+(?:packets?\s+)?received")


@dataclass(frozen=True, slots=True)
class Device:
    """One die as `npu-smi info` lists it."""

    name: str
    health: str
    memory_used_mb: int
    memory_total_mb: int


def smi_devices(output: str) -> list[Device]:
    """The devices of `npu-smi info`: each has two rows, name and health, then bus and memory."""
    found = []
    first: tuple[str, str] | None = None
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        if re.fullmatch(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", cells[1]):
            memory = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
            used, total = (int(n) for n in memory[-1]) if memory else (0, 0)
            if first:
                found.append(Device(first[0], first[1], used, total))
            first = None
        elif match := re.fullmatch(r"\d+\s+(\S+)", cells[0]):
            first = (match.group(1), cells[1])
    return found


def smi_version(output: str) -> str:
    """The driver's version in the head of `npu-smi info`, or empty."""
    match = re.search(r"Version:\s*(\S+)", output)
    return match.group(1) if match else ""


def field(output: str, name: str) -> str:
    """`name: value` or `name : value` in any line; empty when there is none."""
    match = re.search(rf"^\s*{re.escape(name)}\s*:\s*(.*?)\s*$", output, re.MULTILINE | re.IGNORECASE)
    return match.group(1) if match else ""


def link_up(output: str) -> bool | None:
    """`-link -g`."""
    value = field(output, "link status").upper()
    return None if value not in ("UP", "DOWN") else value == "UP"


def net_health(output: str) -> str:
    """`-net_health -g`: Success, Init, Fault, … or empty."""
    return field(output, "net health status")


def gateway(output: str) -> str:
    """`-gateway -g`: the address, or empty."""
    match = re.search(rf"default gateway\s*:\s*{_ADDRESS}", output)
    return match.group(1) if match else ""


def device_address(output: str) -> str:
    """`-ip -g` or `-vnic -g`: the address and never the netmask, or empty."""
    match = re.search(rf"ip\s*addr\s*:\s*{_ADDRESS}", output, re.IGNORECASE)
    return match.group(1) if match else ""


def vnic_up(output: str) -> bool | None:
    """`-vnic -g`."""
    value = field(output, "vnic link status").upper()
    return None if value not in ("UP", "DOWN") else value == "UP"


def tls_switch(output: str) -> str:
    """`-tls -g`: `0` or `1` in the bracket right after `switch`, or empty."""
    match = re.search(r"tls switch\[(\d)\]", output)
    return match.group(1) if match else ""


def ping_counts(output: str) -> tuple[int, int] | None:
    """Packets transmitted and received by `-ping` or `-hccs_ping`."""
    match = _PING.search(output)
    return (int(match.group(1)), int(match.group(2))) if match else None


def is_busy(output: str) -> bool:
    """hccn_tool does one thing at a time."""
    return "hccn_tool is busy" in output
