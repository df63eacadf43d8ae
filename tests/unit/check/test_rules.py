"""Corners of single rules that a broken file shows badly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascend_pd.check.arguments import flags_of
from ascend_pd.check.judge import require_startable
from ascend_pd.check.matrix import base_version, numbers, release
from ascend_pd.errors import OperatorError
from ascend_pd.spec.parse import parse_spec
from tests.unit.check.clusters import Data, findings, good
from tests.unit.spec.texts import cluster_data, text_of


def with_config(tmp_path: Path, **config: object) -> Data:
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = good()
    data["spec"]["model"].update(path=str(tmp_path))
    return data


def test_flags_are_read_as_argparse_reads_them() -> None:
    words = ["-tp", "4", "--a_b=c", "--switch", "--offset", "-1", "word", "--x.y_z", "v"]
    assert flags_of(words) == {
        "--tensor-parallel-size": "4",
        "--a-b": "c",
        "--switch": "",
        "--offset": "-1",
        "--x.y_z": "v",
    }


def test_versions_are_compared_by_number_and_base() -> None:
    assert numbers("26.0.rc1") == (26, 0)
    assert numbers("25.5") < numbers("25.5.1") < numbers("26.0.rc1")
    assert numbers("24.1.rc3") < numbers("25.5")
    assert base_version("v0.23.0.post1+g12") == "0.23.0"
    assert release("0.23.0.post1") == release("0.23.0")
    assert release("0.24.0") is None


def test_recompute_is_refused_for_several_cache_groups(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 32
    data = with_config(tmp_path, architectures=["GptOssForCausalLM"], num_hidden_layers=64, layer_types=kinds)
    data["spec"]["connector"]["loadFailurePolicy"] = "recompute"
    (found,) = findings(data, "load-failure")
    assert "GptOssForCausalLM has full and sliding layers" in found.message
    data["spec"]["connector"]["loadFailurePolicy"] = "fail"
    assert not findings(data, "load-failure")


def test_a_model_with_recurrent_layers_is_refused_by_the_planner(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    data = with_config(tmp_path, num_hidden_layers=64, layer_types=kinds * 16)
    assert any("recurrent" in f.message or "state" in f.message for f in findings(data, "parallel-unsupported"))


def test_mla_may_have_any_tp_that_divides_its_attention_heads() -> None:
    data = good()
    data["spec"]["model"]["geometry"] |= {
        "kvLoraRank": 512,
        "ropeHeadDim": 64,
        "kvHeads": 1,
        "attentionHeads": 128,
    }
    data["spec"]["pools"][0]["parallel"]["tp"] = 16
    assert not findings(data, "tp-heads")
    assert not findings(data, "kv-quant")


def test_one_model_at_two_places_is_the_same_model() -> None:
    data = good()
    data["spec"]["pools"][1]["overrides"] = {"modelPath": "/data/Qwen3-32B"}
    assert not findings(data, "model-mismatch")


def test_a_union_pool_stands_in_for_both_roles_and_opens_no_side_channel() -> None:
    data = cluster_data({"name": "u", "role": "union", "hardware": "cpu", "port": 36000})
    assert findings(data) == []


def test_another_base_port_moves_the_reserved_window() -> None:
    data = good()
    data["spec"]["connector"]["kvPort"] = 30001
    data["spec"]["engine"] = {"env": {"ASCEND_BASE_PORT": "40000"}}
    assert not findings(data, "port-reserved")
    data["spec"]["connector"]["kvPort"] = 41000
    assert findings(data, "port-reserved")


def test_kubernetes_pods_share_no_ports() -> None:
    data = good()
    for pool in data["spec"]["pools"]:
        pool.pop("hosts")
        pool["port"] = 8000
        pool["replicas"] = 3
    assert not findings(data, "port-overlap")
    assert not findings(data, "devices-short")


def test_a_start_is_refused_with_the_first_error_and_the_number_of_others() -> None:
    data = good()
    data["spec"]["pools"][1]["hardware"] = "A2"
    data["spec"]["connector"].pop("secretFile")
    cluster = parse_spec(text_of(data)).cluster
    with pytest.raises(OperatorError) as caught:
        require_startable(cluster, "x.yaml")
    assert caught.value.message.startswith("x.yaml: hardware-mixed: $.spec.pools[1].hardware: prefill pool")
    assert "(and 1 more: ascend-pd check x.yaml)" in caught.value.message
    assert caught.value.fix == "put both on A3 or both on A2"


def test_a_cluster_with_warnings_may_start() -> None:
    data = good()
    data["spec"]["connector"].pop("closedNetwork")
    (found,) = require_startable(parse_spec(text_of(data)).cluster, "x.yaml")
    assert found.rule == "secret"


@pytest.mark.parametrize(
    ("rotary", "refused"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, False),
    ],
)
def test_mla_without_yarn_is_refused_on_a_cpu(tmp_path: Path, rotary: dict[str, object], refused: bool) -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    data = with_config(tmp_path, architectures=["DeepseekV2ForCausalLM"], num_hidden_layers=2, **latent, **rotary)
    data["spec"]["engine"] = {"blockSize": 16}
    for pool in data["spec"]["pools"]:
        pool["hardware"] = "cpu"
    messages = [f.message for f in findings(data, "cpu-limits")]
    assert any("plain rotary" in message for message in messages) is refused
