"""Fake `npu-smi` and `hccn_tool` executables that print what the real ones print on Atlas A2 and A3 nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = """#!/bin/sh
# Answers from files named after the arguments; all else is a usage error.
file="{answers}/$(echo "$*" | tr ' ' '_')"
if [ -f "$file" ]; then cat "$file"; else echo "unknown command"; exit 1; fi
"""
RULE = "+---------------------------+---------------+----------------------------------------------------+"
EXECUTED = "Cmd executed successfully!"
PING = """{address} ping statistics
recv seq=0,time=0.087000ms
recv seq=1,time=0.041000ms
recv seq=2,time=0.040000ms
3 packets transmitted, 3 received, 0.00% packet loss
Cmd executed successfully!
"""
PING_LOST = """device 0 PING {address}
recv time out seq=0
recv time out seq=1
recv time out seq=2
3 packets transmitted, 0 received, 100.00% packet loss
Cmd executed successfully!
"""
HCCS_PING = """This pkt ping success!
This pkt ping success!
This pkt ping success!
3 packets transmitted, 3 received, 0.00% packets loss
"""
HCCS_PING_FAIL = """This pkt send fail!
This pkt send fail!
This pkt send fail!
Cmd executed successfully!
"""


@dataclass
class Node:
    """One fake node; change its answers before `install`."""

    hardware: str
    chip: str = ""
    health: dict[int, str] = field(default_factory=dict)
    used_mb: dict[int, int] = field(default_factory=dict)
    hccn: dict[tuple[int, str], str] = field(default_factory=dict)
    """(device, question) → output, over the healthy one."""
    super_pods: dict[int, str] = field(default_factory=dict)
    pings: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    devices: int = 0
    driver: str = "25.5.1"

    def __post_init__(self) -> None:
        self.devices = self.devices or (8 if self.hardware == "A2" else 16)
        self.chip = self.chip or ("910B3" if self.hardware == "A2" else "Ascend910")

    def smi_info(self) -> str:
        """`npu-smi info`."""
        lines = [
            RULE,
            f"| npu-smi {self.driver}                   Version: {self.driver}                        |",
            RULE,
            "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
            "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
            RULE.replace("-", "="),
        ]
        for n in range(self.devices):
            health, used = self.health.get(n, "OK"), self.used_mb.get(n, 3393)
            card, chip = (n, "0") if self.hardware == "A2" else (n // 2, f"{n % 2}     {n}")
            lines += [
                f"| {card}     {self.chip:<20} | {health:<13} | 93.4        41             0    / 0             |",
                f"| {chip:<25} | 0000:C{n % 10}:00.0  | 0           0    / 0          {used} / 65536         |",
                RULE,
            ]
        lines += [f"| No running processes found in NPU {n}  |" for n in range(self.devices)]
        return "\n".join(lines) + "\n"

    def answer(self, device: int, question: str) -> str:
        """`hccn_tool -i device question`."""
        healthy = {
            "-link -g": "link status: UP\n",
            "-net_health -g": "net health status: Success\n",
            "-gateway -g": "default gateway:11.12.165.1, Iface:eth0\n",
            "-tls -g": f"dev_id:{device}, tls switch[0](0:disable, 1:enable), tls preconfigured[1]\n",
            "-ip -g": f"ipaddr:11.12.165.{10 + device}\nnetmask:255.255.255.0\n",
            "-vnic -g": (
                f"vnic link status: UP\nvnic ipaddr: 192.168.0.{10 + device}\nvnic netmask: 255.255.255.0\n"
            ),
        }
        return self.hccn.get((device, question), healthy[question])

    def install(self, directory: Path) -> str:
        """Write the executables and a root with the node's files; returns the search path."""
        answers = directory / "answers"
        binaries = directory / "bin"
        for path in (answers, binaries):
            path.mkdir(parents=True)
        for tool in {"npu-smi", "hccn_tool"} - set(self.missing):
            script = binaries / tool
            script.write_text(SCRIPT.format(answers=answers / tool))
            script.chmod(0o755)
            (answers / tool).mkdir()
        self._write(answers / "npu-smi", "info", self.smi_info())
        for card in range(8 if self.hardware == "A3" else 0):
            pod = self.super_pods.get(card, "0")
            text = f"\tSDID            : 12\n\tSuper Pod Size  : 384\n\tSuper Pod ID    : {pod}\n"
            self._write(answers / "npu-smi", f"info -t spod-info -i {card} -c 0", text)
        address = "-ip -g" if self.hardware == "A2" else "-vnic -g"
        for device in range(self.devices):
            for question in ("-link -g", "-net_health -g", "-gateway -g", "-tls -g", address):
                self._write(answers / "hccn_tool", f"-i {device} {question}", self.answer(device, question))
        ping = "-ping" if self.hardware == "A2" else "-hccs_ping"
        for peer, text in self.pings.items():
            self._write(answers / "hccn_tool", f"-i 0 {ping} -g address {peer}", text.format(address=peer))
        self._files(directory / "root")
        return f"{binaries}:/bin:/usr/bin"

    def _write(self, directory: Path, arguments: str, text: str) -> None:
        if directory.exists():
            (directory / arguments.replace(" ", "_")).write_text(text)

    def _files(self, root: Path) -> None:
        texts = {
            "etc/hccn.conf": "".join(
                f"address_{n}=11.12.165.{10 + n}\nnetmask_{n}=255.255.255.0\n" for n in range(self.devices)
            ),
            "usr/local/Ascend/driver/version.info": f"Version={self.driver}\nascendhal_version=7.35.23\n",
            "usr/local/Ascend/firmware/version.info": "Version=7.8.0.2.212\nfirmware_version=1.0\n",
            "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": (
                "package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n"
            ),
            "proc/meminfo": "MemTotal: 1000 kB\nHugePages_Total:       0\n",
            "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
            "proc/sys/net/ipv4/ip_local_reserved_ports": "36000-36063\n",
        }
        for name, text in texts.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "dev/shm").mkdir(parents=True)
        for n in range(self.devices):
            (root / f"dev/davinci{n}").touch()
