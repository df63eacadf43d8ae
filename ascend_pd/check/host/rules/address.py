"""A device has no address, or two have the same.

A2: `hccn_tool -ip`. A3: `hccn_tool -vnic`, whose link must be UP. `/etc/hccn.conf` must be readable in the
container and have an address for every device: the transport reads it.

Fix: `hccn_tool -i N -ip -s address A netmask M`; mount /etc/hccn.conf.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.hccn import answers, tool_trouble
from ascend_pd.check.host.tools import device_address, vnic_up
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.spec.cluster import Hardware

NAME = "host-device-address"
SEVERITY = "error"
ZH = """设备没有地址，或两个设备地址相同。

A2:`hccn_tool -ip`。A3:`hccn_tool -vnic`，其链路必须为 UP。容器内必须能读 `/etc/hccn.conf`，且其中有每个设备的
地址：传输层会读它。

处理：`hccn_tool -i N -ip -s address A netmask M`；挂载 /etc/hccn.conf。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Tool first, then the file."""
    if not pool.is_npu:
        return
    where = f"host:{facts.hostname}"
    a2 = pool.spec.hardware is Hardware.A2
    if trouble := tool_trouble(facts, NAME):
        yield trouble
    owners: dict[str, int] = {}
    for device, run in answers(facts, "-ip -g" if a2 else "-vnic -g"):
        address = device_address(run.output)
        if not a2 and vnic_up(run.output) is False:
            yield error(
                NAME, where, f"device {device}: vNIC link is DOWN", "check the SuperPoD's switches", run.lines
            )
        if not address:
            fix = f"hccn_tool -i {device} -ip -s address ADDRESS netmask MASK" if a2 else "check the SuperPoD"
            yield error(NAME, where, f"device {device}: no address", fix, run.lines)
        elif (first := owners.setdefault(address, device)) != device:
            yield error(NAME, where, f"devices {first} and {device} both have {address}", "give each its own")
    yield from _conf(pool, facts, where)


def _conf(pool: Pool, facts: HostFacts, where: str) -> Iterator[Finding]:
    text = facts.files.get("/etc/hccn.conf")
    if not text:
        yield error(NAME, where, "/etc/hccn.conf is missing or empty", "mount the node's file into the container")
        return
    wanted = pool.hardware.devices_per_node
    lacking = [n for n in range(wanted) if f"address_{n}=" not in text.replace(" ", "")]
    if lacking and pool.spec.hardware is Hardware.A2:
        names = ", ".join(f"address_{n}" for n in lacking)
        yield error(NAME, where, f"/etc/hccn.conf has no {names}", "set the device addresses with hccn_tool")
