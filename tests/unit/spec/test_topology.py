from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ascend_pd.spec.cluster import Role
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.topology import derive_topology
from tests.unit.spec.texts import cluster, pool

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples"


def npu(name: str, role: str, port: int, tp: int, dp: int, hosts: list[str], **more: object) -> dict[str, object]:
    parallel = {"tp": tp, "dp": dp, "pp": more.pop("pp", 1)}
    hardware = more.pop("hardware", "A3")
    return {
        "name": name,
        "role": role,
        "hardware": hardware,
        "port": port,
        "parallel": parallel,
        "hosts": hosts,
        **more,
    }


def test_the_cpu_example_has_the_ports_it_documents() -> None:
    topology = derive_topology(load_spec(EXAMPLES / "cpu-1p1d.yaml"))
    prefill, decode = topology.engines
    assert (prefill.url, prefill.side_channel_port) == ("http://127.0.0.1:8100", 28000)
    assert (decode.url, decode.side_channel_port) == ("http://127.0.0.1:8200", 28001)
    assert topology.proxy.url == "http://127.0.0.1:8000"
    assert topology.metaserver is None
    assert prefill.devices_on("127.0.0.1") == ()


def test_layerwise_mode_brings_a_metaserver() -> None:
    topology = derive_topology(load_spec(EXAMPLES / "cpu-1p1d-layerwise.yaml"))
    assert topology.metaserver is not None
    assert topology.metaserver.url == "http://127.0.0.1:9000"


def test_replicas_of_one_pool_on_one_host_get_consecutive_ports() -> None:
    topology = derive_topology(cluster(pool("p", "prefill", 8100, replicas=2), pool("d", "decode", 8200)))
    assert [(e.http_port, e.side_channel_port) for e in topology.engines] == [
        (8100, 36000),
        (8101, 36001),
        (8200, 36002),
    ]


def test_dp_ranks_are_engines_with_their_own_ports_devices_and_ids() -> None:
    topology = derive_topology(
        cluster(npu("p", "prefill", 8100, 8, 2, ["a"]), npu("d", "decode", 8200, 4, 4, ["b"]))
    )
    replica = topology.replica("d")
    assert replica is not None
    assert [e.engine_id for e in replica.engines] == [f"test-d-0-dp{r}" for r in range(4)]
    assert [e.http_port for e in replica.engines] == [8200, 8201, 8202, 8203]
    assert {e.kv_port for e in replica.engines} == {36000}
    assert [e.side_channel_port for e in replica.engines] == [36000, 36001, 36002, 36003]
    assert replica.dp_rpc_port == 36004
    assert [e.devices_on("b") for e in replica.engines] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]


def test_replicas_spread_over_the_hosts_and_two_pools_share_a_host_without_sharing_devices() -> None:
    topology = derive_topology(
        cluster(
            npu("p", "prefill", 8100, 8, 1, ["a", "b"], replicas=2),
            npu("d", "decode", 8200, 4, 1, ["a", "b"], replicas=2),
        )
    )
    assert [e.host for e in topology.engines] == ["a", "b", "a", "b"]
    assert topology.engines[2].devices_on("a") == (8, 9, 10, 11)
    assert topology.engines[2].side_channel_port == 36001


def test_an_engine_fills_whole_nodes_when_its_dp_ranks_need_several() -> None:
    topology = derive_topology(cluster(npu("d", "decode", 8200, 1, 32, ["a", "b"])))
    replica = topology.replica("d")
    assert replica is not None
    assert replica.hosts == ("a", "b")
    first_on_b = replica.engines[16]
    assert (first_on_b.host, first_on_b.http_port, first_on_b.side_channel_port) == ("b", 8200, 36016)
    assert first_on_b.devices_on("b") == (0,)


def test_pipeline_stages_over_two_nodes_get_a_start_up_port() -> None:
    topology = derive_topology(cluster(npu("p", "prefill", 8100, 8, 1, ["a", "b"], pp=2, hardware="A2")))
    replica = topology.replica("p")
    assert replica is not None
    (engine,) = replica.engines
    assert [w.host for w in engine.workers] == ["a"] * 8 + ["b"] * 8
    assert [w.pp_rank for w in engine.workers] == [0] * 8 + [1] * 8
    assert replica.master_port(0) == 36002


def test_npu_pools_without_hosts_are_pods_with_names_of_their_own() -> None:
    topology = derive_topology(cluster(npu("p", "prefill", 8100, 8, 1, [], replicas=2)))
    assert [e.host for e in topology.engines] == ["test-p-0-0.test-p", "test-p-1-0.test-p"]
    assert {e.side_channel_port for e in topology.engines} == {36000}
    assert topology.replicas[0].in_kubernetes


def test_engines_are_listed_by_role() -> None:
    topology = derive_topology(cluster(pool("u", "union", 8100), pool("d", "decode", 8200)))
    assert [e.pool for e in topology.engines_of(Role.UNION)] == ["u"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 4, 8, 16]),
            st.integers(1, 9),
            st.integers(1, 3),
            st.integers(1, 3),
            st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_two_listeners_collide_whatever_the_layout(layout: list[tuple[int, int, int, int, list[str]]]) -> None:
    pools = [
        npu(f"pool{i}", "prefill", 1000 * (i + 1), tp, dp, hosts, pp=pp, replicas=replicas, hardware="A2")
        for i, (tp, dp, pp, replicas, hosts) in enumerate(layout)
    ]
    topology = derive_topology(cluster(*pools, proxy={"port": 9999}))
    bound = [(listener.address.host, listener.address.port) for listener in topology.listeners]
    assert len(bound) == len(set(bound))
    ids = [engine.engine_id for engine in topology.engines]
    assert len(ids) == len(set(ids))
    devices = [(w.host, w.device) for engine in topology.engines for w in engine.workers]
    assert len(devices) == len(set(devices))
