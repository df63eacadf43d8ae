"""Command lines and environments that follow from a cluster file."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ascend_pd.cli.engine import select_plan
from ascend_pd.errors import OperatorError
from ascend_pd.launch.engine_command import engine_plan
from ascend_pd.launch.front_command import cluster_plan
from ascend_pd.launch.plan import Kind, ProcessPlan, Site
from ascend_pd.launch.site import as_shell, full_environment
from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.topology import derive_topology
from ascend_pd.wire.connector_config import parse_connector_config

SITE = Site(python="python", model_dir="/cache/SmolLM2", cores=8)


def cluster(pools: list[dict[str, Any]] | None = None, **spec: Any) -> PDCluster:
    default_pools = [
        {"name": "prefill", "role": "prefill", "hardware": "cpu", "port": 8100},
        {"name": "decode", "role": "decode", "hardware": "cpu", "port": 8200},
    ]
    return PDCluster.model_validate(
        {
            "apiVersion": "ascend-pd/v1",
            "kind": "PDCluster",
            "metadata": {"name": "test"},
            "spec": {
                "model": {"path": "smollm2", "maxModelLen": 2048, "dtype": "float32"},
                "connector": {"protocol": "tcp"},
                "pools": pools or default_pools,
                **spec,
            },
        }
    )


def plans(of: PDCluster) -> dict[str, ProcessPlan]:
    return {plan.name: plan for plan in cluster_plan(of, derive_topology(of), SITE, Path("/some/cluster.yaml"))}


def option(plan: ProcessPlan, name: str) -> str:
    assert plan.argv.count(name) == 1, plan.argv
    return plan.argv[plan.argv.index(name) + 1]


def kv_config(plan: ProcessPlan) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(option(plan, "--kv-transfer-config"))
    return config


def test_prefill_and_decode_differ_in_role_port_and_engine_id_only() -> None:
    started = plans(cluster())
    assert list(started) == ["prefill/0", "decode/0", "proxy"]
    prefill, decode = kv_config(started["prefill/0"]), kv_config(started["decode/0"])
    assert (prefill.pop("kv_role"), decode.pop("kv_role")) == ("kv_producer", "kv_consumer")
    assert (prefill.pop("kv_port"), decode.pop("kv_port")) == (36000, 36001)
    assert (prefill.pop("engine_id"), decode.pop("engine_id")) == ("test-prefill-0", "test-decode-0")
    assert prefill == decode
    assert prefill["kv_connector"] == "MooncakeConnector" and prefill["kv_connector_module_path"] == "connectors"


@pytest.mark.parametrize("mode", ["pull", "layerwise"])
def test_the_connector_understands_every_key_it_is_given(mode: str) -> None:
    spec = {"mode": mode, "protocol": "tcp", "leaseSeconds": 7, "secretFile": "/s",
            "maxHoldSeconds": 70, "transferSeconds": 71, "quarantineSeconds": 3}  # fmt: skip
    started = plans(cluster(connector=spec))
    config = parse_connector_config(kv_config(started["decode/0"])["kv_connector_extra_config"])
    assert (config.lease_seconds, config.max_hold_seconds) == (7, 70)
    assert (config.transfer_seconds, config.quarantine_seconds) == (71, 3)
    assert config.secret_file == "/s" and config.protocol == "tcp"
    assert config.metaserver == ("http://127.0.0.1:9000" if mode == "layerwise" else "")


def test_layerwise_starts_a_metaserver_first_and_tells_the_proxy(tmp_path: Path) -> None:
    started = plans(cluster(connector={"mode": "layerwise", "protocol": "tcp"}))
    assert next(iter(started)) == "metaserver"
    assert kv_config(started["prefill/0"])["kv_connector"] == "MooncakeLayerwiseConnector"
    settings = proxy_settings(cluster(connector={"mode": "layerwise", "protocol": "tcp"}), tmp_path)
    assert (settings.metaserver, settings.mode) == ("http://127.0.0.1:9000", "layerwise")


def proxy_settings(of: PDCluster, directory: Path) -> Any:
    """What the proxy makes of the command line that it is started with."""
    spec = directory / "cluster.yaml"
    spec.write_text(json.dumps(of.model_dump(mode="json", by_alias=True, exclude_none=True)), encoding="utf-8")
    [*_, proxy] = cluster_plan(of, derive_topology(of), SITE, spec)
    return import_module("proxy.load").load_settings(proxy.argv[3:])


def test_the_proxy_is_told_each_engine_and_its_side_channel(tmp_path: Path) -> None:
    settings = proxy_settings(cluster(), tmp_path)
    assert [(one.url, one.side) for one in settings.prefill] == [("http://127.0.0.1:8100", "127.0.0.1:36000")]
    assert [(one.url, one.side) for one in settings.decode] == [("http://127.0.0.1:8200", "127.0.0.1:36001")]


def test_the_proxy_reads_the_file_itself_so_that_it_can_again() -> None:
    assert option(plans(cluster())["proxy"], "--spec") == "/some/cluster.yaml"


def test_the_proxy_reads_another_file_again_when_it_is_started_from_a_copy() -> None:
    of = cluster()
    [*_, proxy] = cluster_plan(of, derive_topology(of), SITE, Path("/copy.yaml"), Path("/own.yaml"))
    assert (option(proxy, "--spec"), option(proxy, "--reload-spec")) == ("/copy.yaml", "/own.yaml")


def test_the_proxy_understands_everything_the_cluster_file_tells_it(tmp_path: Path) -> None:
    proxy = {
        "policy": {"prefill": "round-robin"},
        "port": 8080,
        "adminPort": 9100,
        "adminKeyFile": "/a",
        "apiKeyFile": "/k",
    }
    connector = {"mode": "layerwise", "protocol": "tcp", "secretFile": "/s"}
    settings = proxy_settings(cluster(proxy=proxy, connector=connector), tmp_path)
    assert (settings.port, settings.secret_file) == (8080, "/s")
    listener = settings.listener
    assert (listener.admin_port, listener.admin_key_file, listener.api_key_file) == (9100, "/a", "/k")


def test_the_embedded_model_is_where_the_site_has_it() -> None:
    assert option(plans(cluster())["prefill/0"], "--model") == "/cache/SmolLM2"


def test_a_union_engine_gets_no_connector(tmp_path: Path) -> None:
    alone = cluster([{"name": "all", "role": "union", "hardware": "cpu", "port": 8100}])
    assert "--kv-transfer-config" not in plans(alone)["all/0"].argv
    [union] = proxy_settings(alone, tmp_path).union
    assert (union.url, union.side) == ("http://127.0.0.1:8100", "")


def test_cores_are_shared_by_the_engines_of_a_host() -> None:
    assert plans(cluster())["prefill/0"].env["OMP_NUM_THREADS"] == "4"


def test_mooncakes_inner_timers_end_before_its_outer_one() -> None:
    env = plans(cluster())["decode/0"].env
    outer = int(env["MC_TRANSFER_TIMEOUT"])
    assert (
        2 * int(env["MC_TCP_STATUS_TIMEOUT_SEC"]) < outer and 2 * int(env["MC_TCP_PROGRESS_TIMEOUT_SEC"]) < outer
    )


def test_the_operator_has_the_last_word_pool_over_engine() -> None:
    pools = [
        {"name": "p", "role": "prefill", "hardware": "cpu", "port": 8100,
         "env": {"VLLM_CPU_KVCACHE_SPACE": "3"}, "extraArgs": ["--seed", "1"]},
        {"name": "d", "role": "decode", "hardware": "cpu", "port": 8200},
    ]  # fmt: skip
    started = plans(cluster(pools, engine={"env": {"VLLM_CPU_KVCACHE_SPACE": "2"}, "extraArgs": ["--seed", "0"]}))
    assert started["p/0"].env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert started["d/0"].env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert started["p/0"].argv[-4:] == ("--seed", "0", "--seed", "1")


def test_a_pools_overrides_win() -> None:
    own = {"modelPath": "/m", "maxModelLen": 64, "dtype": "bfloat16", "blockSize": 32, "kvCacheDtype": "fp8"}
    pools = [
        {"name": "p", "role": "prefill", "hardware": "cpu", "port": 8100, "overrides": own},
        {"name": "d", "role": "decode", "hardware": "cpu", "port": 8200},
    ]
    plan = plans(cluster(pools))["p/0"]
    names = ("--model", "--max-model-len", "--dtype", "--block-size", "--kv-cache-dtype")
    assert [option(plan, name) for name in names] == ["/m", "64", "bfloat16", "32", "fp8"]


NPU_POOLS = [
    {"name": "p", "role": "prefill", "hardware": "A2", "port": 8100, "hosts": ["10.0.0.1"], "parallel": {"tp": 8}},
    {"name": "d", "role": "decode", "hardware": "A2", "port": 8200, "hosts": ["10.0.0.2"],
     "parallel": {"tp": 2, "dp": 4, "ep": True}},
]  # fmt: skip


def test_each_dp_rank_on_npus_has_its_own_devices_and_endpoint() -> None:
    started = plans(cluster(NPU_POOLS, connector={"protocol": "ascend"}))
    assert list(started) == ["p/0", "d/0/dp0", "d/0/dp1", "d/0/dp2", "d/0/dp3", "proxy"]
    last = started["d/0/dp3"]
    assert last.env["ASCEND_RT_VISIBLE_DEVICES"] == "6,7" and last.env["HCCL_IF_IP"] == "10.0.0.2"
    assert option(last, "--data-parallel-rank") == "3" and option(last, "--port") == "8203"
    assert option(last, "--data-parallel-address") == "10.0.0.2"
    assert "--enable-expert-parallel" in last.argv and "--enforce-eager" not in last.argv
    assert option(last, "--host") == "0.0.0.0" and option(last, "--gpu-memory-utilization") == "0.9"
    assert "VLLM_CPU_KVCACHE_SPACE" not in last.env
    assert int(last.env["ASCEND_TRANSFER_TIMEOUT"]) < 1000 * int(last.env["MC_TRANSFER_TIMEOUT"])


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [("pull", set(), {"--no-async-scheduling"}), ("layerwise", {"--enforce-eager"}, {"--no-async-scheduling"})],
)
def test_npu_engines_keep_layer_hooks_and_received_blocks_safe(
    mode: str, prefill: set[str], decode: set[str]
) -> None:
    front = {"metaserver": {"host": "10.0.0.1", "port": 9000}} if mode == "layerwise" else {}
    started = plans(cluster(NPU_POOLS, connector={"protocol": "ascend", "mode": mode}, **front))
    asked = {"--enforce-eager", "--no-async-scheduling"}
    assert set(started["p/0"].argv) & asked == prefill
    assert set(started["d/0/dp0"].argv) & asked == decode


def test_an_engine_over_two_hosts_has_a_headless_second_node() -> None:
    pools = [{"name": "p", "role": "union", "hardware": "A2", "port": 8100, "hosts": ["10.0.0.1", "10.0.0.2"],
              "parallel": {"tp": 16}}]  # fmt: skip
    of = cluster(pools)
    topology = derive_topology(of)
    replica = topology.replicas[0]
    first, second = (engine_plan(of, topology, replica, replica.engines[0], SITE, node) for node in (0, 1))
    assert (option(first, "--node-rank"), option(second, "--node-rank")) == ("0", "1")
    assert option(second, "--master-addr") == "10.0.0.1" and option(second, "--nnodes") == "2"
    assert "--headless" in second.argv and "--port" not in second.argv and second.host == "10.0.0.2"
    assert second.env["VLLM_HOST_IP"] == "10.0.0.2"


def test_workers_on_an_engines_second_host_are_reached_there() -> None:
    pools = [{**NPU_POOLS[0], "hosts": ["10.0.0.1", "10.0.0.3"], "parallel": {"tp": 16}}, NPU_POOLS[1]]
    of = cluster(pools, connector={"protocol": "ascend"})
    topology = derive_topology(of)
    replica = topology.replicas[0]
    plans_of = [engine_plan(of, topology, replica, replica.engines[0], SITE, node) for node in (0, 1)]
    configs = [kv_config(plan) for plan in plans_of]
    assert [config["kv_connector_extra_config"].pop("host") for config in configs] == ["10.0.0.1", "10.0.0.3"]
    assert configs[0] == configs[1]


def test_a_checkout_stays_importable_in_any_folder() -> None:
    plan = plans(cluster())["prefill/0"]
    env = full_environment(plan, {"PYTHONPATH": "/mine", "HOME": "/h"})
    assert env["PYTHONPATH"].split(":")[-1] == "/mine" and env["HOME"] == "/h"
    assert (Path(env["PYTHONPATH"].split(":")[0]) / "ascend_pd").is_dir()
    assert full_environment(plan, env)["PYTHONPATH"] == env["PYTHONPATH"]


def test_the_printed_shell_text_is_the_plan() -> None:
    import shlex

    plan = plans(cluster())["prefill/0"]
    text = as_shell(plan)
    exports, _, command = text.partition("exec ")
    assert tuple(shlex.split(command.replace("\\\n", ""))) == plan.argv
    assert {line.partition("=")[0].removeprefix("export ") for line in exports.splitlines()} == set(plan.env)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (("nope", 0, 0, 0), r"no replica nope/0 - it has: prefill \(replicas 0 to 0\), decode"),
        (("decode", 1, 0, 0), "no replica decode/1"),
        (("decode", 0, 1, 0), "no DP rank 1 - it has 0 to 0"),
        (("decode", 0, 0, 1), "no node 1"),
    ],
)
def test_an_engine_that_is_not_in_the_file_is_refused(where: tuple[str, int, int, int], says: str) -> None:
    with pytest.raises(OperatorError, match=says):
        select_plan(cluster(), SITE, *where)


def test_engines_are_told_apart_from_the_front() -> None:
    kinds = [plan.kind for plan in plans(cluster(connector={"mode": "layerwise", "protocol": "tcp"})).values()]
    assert kinds == [Kind.METASERVER, Kind.ENGINE, Kind.ENGINE, Kind.PROXY]
