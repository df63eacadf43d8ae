"""The host probes against fake tools, the failures that exit with code 0 among them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ascend_pd.check.finding import Finding
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.gather import Probe, gather
from ascend_pd.check.host.judge import judge_host
from ascend_pd.check.host.rules import HOST_RULES
from ascend_pd.check.judge import subject_of
from ascend_pd.check.subject import Subject
from ascend_pd.spec.parse import parse_spec
from tests.unit.check.clusters import good
from tests.unit.check.host.atlas import HCCS_PING, HCCS_PING_FAIL, PING, PING_LOST, Node
from tests.unit.spec.texts import text_of

PEER = "11.12.165.99"


def subject(hardware: str, **pool: object) -> Subject:
    data = good(hardware)
    data["spec"]["pools"][0].update(pool)
    return subject_of(parse_spec(text_of(data)).cluster)


def seen(node: Node, tmp_path: Path, peers: tuple[str, ...] = (), **pool: object) -> tuple[Subject, HostFacts]:
    cluster = subject(node.hardware, **pool)
    replica = cluster.topology.replica("prefill")
    assert replica is not None
    probe = Probe(root=tmp_path / "root", python="true", search_path=node.install(tmp_path), peers=peers)
    return cluster, gather(cluster, replica, probe)


def found(node: Node, tmp_path: Path, rule: str, peers: tuple[str, ...] = (), **pool: object) -> list[Finding]:
    cluster, facts = seen(node, tmp_path, peers, **pool)
    return [f for f in judge_host(cluster, facts) if f.rule == rule]


def said(node: Node, tmp_path: Path, rule: str, *peers: str) -> list[tuple[str, str]]:
    return [(f.severity.value, f.message) for f in found(node, tmp_path, rule, peers)]


NPU_RULES = ("host-devices", "host-generation", "host-network", "host-device-address", "host-tls", "host-ping")


@pytest.mark.parametrize("hardware", ["A2", "A3"])
def test_a_healthy_node_passes_every_npu_rule(hardware: str, tmp_path: Path) -> None:
    node = Node(hardware, pings={PEER: PING if hardware == "A2" else HCCS_PING})
    cluster, facts = seen(node, tmp_path, (PEER,))
    assert [f for f in judge_host(cluster, facts) if f.rule in NPU_RULES] == []


def test_a_missing_tool_is_unknown_and_neither_pass_nor_failure(tmp_path: Path) -> None:
    node = Node("A2", missing=("npu-smi", "hccn_tool"))
    cluster, facts = seen(node, tmp_path, (PEER,))
    judged = {f.rule: f.severity.value for f in judge_host(cluster, facts) if f.rule in NPU_RULES}
    expected = {"host-devices", "host-network", "host-device-address", "host-tls", "host-ping"}
    assert judged == dict.fromkeys(expected, "unknown")


def test_a_dead_card_and_a_sick_one_are_named(tmp_path: Path) -> None:
    node = Node("A2", devices=7, health={3: "Alarm"}, used_mb={5: 40000})
    assert said(node, tmp_path, "host-devices") == [
        ("error", "npu-smi lists 7 devices, A2 has 8"),
        ("error", "device 3 (910B3) has health Alarm"),
        ("warning", "device 5 already holds 40000 of 65536 MB"),
    ]


def test_a_table_that_cannot_be_read_is_unknown_and_a_driver_that_fails_is_not(tmp_path: Path) -> None:
    cluster = subject("A2")
    for output, severity in (
        ("a new table\n", "unknown"),
        ("dcmi module initialize failed. ret is -8005\n", "error"),
    ):
        search = Node("A2").install(tmp_path / severity)
        (tmp_path / severity / "answers/npu-smi/info").write_text(output)
        probe = Probe(root=tmp_path / severity / "root", search_path=search, python="true")
        facts = gather(cluster, cluster.topology.replicas[0], probe)
        (finding,) = [f for f in judge_host(cluster, facts) if f.rule == "host-devices"]
        assert finding.severity.value == severity
        assert finding.evidence == (output.strip(),)


def test_devices_not_mounted_into_the_container_are_counted(tmp_path: Path) -> None:
    node = Node("A2")
    search = node.install(tmp_path)
    (tmp_path / "root/dev/davinci7").unlink()
    cluster = subject("A2")
    replica = cluster.topology.replicas[0]
    facts = gather(cluster, replica, Probe(root=tmp_path / "root", python="true", search_path=search))
    assert [f.message for f in judge_host(cluster, facts) if f.rule == "host-devices"] == [
        "7 of 8 /dev/davinciN are here"
    ]


def test_an_a2_that_the_file_calls_a3_is_refused(tmp_path: Path) -> None:
    node = Node("A2")
    search = node.install(tmp_path)
    cluster = subject("A3")
    facts = gather(
        cluster, cluster.topology.replicas[0], Probe(root=tmp_path / "root", python="true", search_path=search)
    )
    (finding,) = [f for f in judge_host(cluster, facts) if f.rule == "host-generation"]
    assert finding.message == "this node is A2 (910B3, 8 devices), the file says A3"
    assert any("910B3" in line for line in finding.evidence)


def test_a_chip_of_no_known_generation_is_unknown(tmp_path: Path) -> None:
    assert said(Node("A2", chip="310P3"), tmp_path, "host-generation") == [
        ("unknown", "npu-smi names 310P3: no known generation")
    ]


def test_cards_of_two_super_pods_and_a_wrong_super_pod_are_refused(tmp_path: Path) -> None:
    node = Node("A3", super_pods={7: "1"})
    assert said(node, tmp_path / "a", "host-generation") == [("error", "cards are in different SuperPoDs: 0, 1")]
    (finding,) = found(Node("A3"), tmp_path / "b", "host-generation", superPod="sp-3")
    assert finding.message == "this node is in SuperPoD 0, the file says sp-3"


@pytest.mark.parametrize(("hardware", "severity"), [("A2", "error"), ("A3", "warning")])
def test_a_link_that_is_down_is_fatal_only_where_roce_carries_the_cache(
    hardware: str, severity: str, tmp_path: Path
) -> None:
    node = Node(hardware, hccn={(5, "-link -g"): "link status: DOWN\n"})
    (finding,) = found(node, tmp_path, "host-network")
    assert (finding.severity.value, finding.message) == (severity, "device 5: link is DOWN")
    assert finding.evidence == ("link status: DOWN",)


def test_health_codes_and_missing_gateways_are_told_apart(tmp_path: Path) -> None:
    node = Node(
        "A2",
        hccn={
            (0, "-net_health -g"): "net health status: Init\n",
            (1, "-net_health -g"): "net health status: Receive timeout\n",
            (2, "-net_health -g"): "hccn_tool: something new\n",
            (3, "-gateway -g"): "Get gateway failed, because no gateway was preset\n",
        },
    )
    assert said(node, tmp_path, "host-network") == [
        ("warning", "device 0: network health Init, no detect address"),
        ("error", "device 1: network health Receive timeout"),
        ("unknown", "device 2: no network health"),
        ("warning", "device 3: no gateway: hosts in another subnet cannot be reached"),
    ]


def test_a_netmask_is_never_taken_for_an_address(tmp_path: Path) -> None:
    node = Node(
        "A2",
        hccn={
            (0, "-ip -g"): "netmask:255.255.255.0\n",
            (1, "-ip -g"): "Get ipconf failed, because no ip was preset\n",
            (3, "-ip -g"): "ipaddr:11.12.165.12\nnetmask:255.255.255.0\n",
        },
    )
    assert said(node, tmp_path, "host-device-address") == [
        ("error", "device 0: no address"),
        ("error", "device 1: no address"),
        ("error", "devices 2 and 3 both have 11.12.165.12"),
    ]


def test_a_vnic_that_is_down_and_a_missing_hccn_conf_are_refused(tmp_path: Path) -> None:
    node = Node("A3", hccn={(9, "-vnic -g"): "vnic link status: DOWN\nvnic ipaddr: 192.168.0.19\n"})
    search = node.install(tmp_path)
    (tmp_path / "root/etc/hccn.conf").unlink()
    cluster = subject("A3")
    facts = gather(
        cluster, cluster.topology.replicas[0], Probe(root=tmp_path / "root", python="true", search_path=search)
    )
    messages = [f.message for f in judge_host(cluster, facts) if f.rule == "host-device-address"]
    assert messages == ["device 9: vNIC link is DOWN", "/etc/hccn.conf is missing or empty"]


def test_the_tls_switch_is_read_from_its_own_bracket(tmp_path: Path) -> None:
    on = "dev_id:6, tls switch[1](0:disable, 1:enable), tls preconfigured[1]\n"
    (finding,) = found(Node("A2", hccn={(6, "-tls -g"): on}), tmp_path, "host-tls")
    assert finding.message == "TLS is on for devices 6 and off for 0, 1, 2, 3, 4, 5, 7"
    assert len(finding.evidence) == 8


@pytest.mark.parametrize(
    ("hardware", "output", "expected"),
    [
        ("A2", PING_LOST, ("error", f"{PEER}: no answer to 3 packets")),
        ("A3", HCCS_PING_FAIL, ("error", f"{PEER}: no answer")),
        (
            "A2",
            "3 packets transmitted, 2 received, 33.33% packet loss\n",
            ("warning", f"{PEER}: 2 of 3 packets came back"),
        ),
        ("A2", "Cmd executed successfully!\n", ("unknown", f"{PEER}: the tool counted no packets")),
    ],
)
def test_a_ping_is_judged_by_counted_packets_and_not_by_its_exit_code(
    hardware: str, output: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    node = Node(hardware, pings={PEER: output})
    cluster, facts = seen(node, tmp_path, (PEER,))
    run = next(run for line, run in facts.commands.items() if line.endswith(PEER))
    assert run.code == 0
    judged = [(f.severity.value, f.message) for f in judge_host(cluster, facts) if f.rule == "host-ping"]
    assert judged == [expected]


def test_what_is_installed_is_compared_with_what_is_stated(tmp_path: Path) -> None:
    data = good("A2")
    data["spec"]["engine"] = {"versions": {"driver": "26.0.rc1", "cann": "9.1.0", "firmware": "7.8.0.2.212"}}
    cluster = subject_of(parse_spec(text_of(data)).cluster)
    probe = Probe(root=tmp_path / "root", python="true", search_path=Node("A2").install(tmp_path))
    facts = gather(cluster, cluster.topology.replicas[0], probe)
    facts = msgspec.structs.replace(facts, packages={"vllm": "0.11.0", "vllm-ascend": "0.23.0.post1"})
    messages = [f.message for f in judge_host(cluster, facts) if f.rule == "host-versions"]
    assert messages == [
        "driver 25.5.1 is installed, the file says 26.0.rc1",
        "the connectors have no adapter for vLLM 0.11.0",
        "vllm-ascend 0.23.0.post1 goes with vllm 0.23.0, 0.11.0 is installed",
    ]


def test_facts_survive_the_trip_through_a_file(tmp_path: Path) -> None:
    cluster, facts = seen(Node("A2", health={3: "Alarm"}), tmp_path)
    again = msgspec.json.decode(msgspec.json.encode(facts), type=HostFacts)
    assert judge_host(cluster, again) == judge_host(cluster, facts)
    assert json.loads(msgspec.json.encode(facts))["commands"]["npu-smi info"]["state"] == "ran"


def test_every_host_rule_is_tested_here_or_beside() -> None:
    texts = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in HOST_RULES if f'"{name}"' not in texts] == []
