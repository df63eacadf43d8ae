"""Whatever a readable file says, every rule answers, in the same way each time, and points into the file."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_pd.check.judge import judge_spec, subject_of
from ascend_pd.check.outcome import outcome_of_findings
from ascend_pd.check.report_json import render_json
from ascend_pd.check.report_text import render_plain
from ascend_pd.spec.parse import parse_spec
from tests.unit.spec.texts import text_of

Data = dict[str, Any]
size = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 17, 32])
few = st.sampled_from([1, 2, 5])
port = st.sampled_from([1, 80, 8000, 8100, 16000, 20000, 35999, 36000, 65535, 70000])
host = st.sampled_from(["10.0.0.1", "10.0.0.2", "127.0.0.1", "localhost", "0.0.0.0", "::1", "node-a"])
dtype = st.sampled_from(["auto", "bfloat16", "float16", "float32"])
variables = st.dictionaries(
    st.sampled_from(
        [
            "HCCL_INTRA_PCIE_ENABLE",
            "HCCL_INTRA_ROCE_ENABLE",
            "HCCL_RDMA_TIMEOUT",
            "ASCEND_TRANSFER_TIMEOUT",
            "ASCEND_BASE_PORT",
            "MC_TRANSFER_TIMEOUT",
            "MC_TCP_STATUS_TIMEOUT_SEC",
            "VLLM_CPU_KVCACHE_SPACE",
            "PYTHONHASHSEED",
            "MOONCAKE_MASTER",
            "VLLM_HOST_IP",
        ]
    ),
    st.sampled_from(["", "0", "1", "20", "99999999999999999999", "-1", "x", "²"]),
    max_size=4,
)
arguments = st.lists(
    st.sampled_from(
        [
            "-tp",
            "2",
            "--port=1",
            "--speculative-config",
            '{"method": "mtp", "num_speculative_tokens": 2}',
            "[]",
            "--prefill-context-parallel-size",
            "²",
            "-",
            "",
            "--",
        ]
    ),
    max_size=4,
)
pool = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", "c"]),
        "role": st.sampled_from(["prefill", "decode", "union"]),
        "hardware": st.sampled_from(["A2", "A3", "cpu"]),
        "port": port,
    },
    optional={
        "replicas": st.integers(1, 4),
        "parallel": st.fixed_dictionaries({}, optional={"tp": size, "dp": few, "pp": few, "ep": st.booleans()}),
        "hosts": st.lists(host, max_size=3),
        "superPod": st.sampled_from(["sp-0", "sp-1"]),
        "memoryFraction": st.sampled_from([0.01, 0.9, 1]),
        "maxNumBatchedTokens": st.sampled_from([1, 8192, 10**9]),
        "overrides": st.fixed_dictionaries(
            {}, optional={"dtype": dtype, "blockSize": size, "maxModelLen": st.sampled_from([1, 10**9])}
        ),
        "env": variables,
        "extraArgs": arguments,
    },
)
geometry = st.fixed_dictionaries(
    {},
    optional={
        "layers": size,
        "attentionHeads": size,
        "kvHeads": size,
        "headDim": size,
        "hiddenSize": size,
        "weightBytes": st.sampled_from([0, 1, 10**12]),
        "expertWeightBytes": st.sampled_from([0, 10**12]),
        "activeWeightBytes": st.sampled_from([0, 10**9]),
        "kvLoraRank": size,
        "ropeHeadDim": size,
    },
)
cluster = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"path": st.sampled_from(["smollm2", "/nowhere"]), "maxModelLen": st.sampled_from([1, 2048, 10**9])},
            optional={"geometry": geometry, "dtype": dtype, "kvCacheDtype": st.sampled_from(["auto", "int8"])},
        ),
        "pools": st.lists(pool, min_size=1, max_size=4),
    },
    optional={
        "engine": st.fixed_dictionaries(
            {},
            optional={
                "blockSize": size,
                "env": variables,
                "extraArgs": arguments,
                "versions": st.dictionaries(
                    st.sampled_from(["vllm", "vllm-ascend", "cann", "mooncake", "driver"]),
                    st.sampled_from(["", "0.23.0", "v0.23.0.post1", "9.1.0", "x", "..", "26.0.rc1"]),
                ),
            },
        ),
        "connector": st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["pull", "layerwise"]),
                "transport": st.sampled_from(["mooncake", "memfabric"]),
                "protocol": st.sampled_from(["ascend", "tcp", "rdma", "device_sdma", "device_rdma"]),
                "kvPort": port,
                "leaseSeconds": st.sampled_from([0.001, 30, 10**6]),
                "transferSeconds": st.sampled_from([0.001, 60, 10**6]),
                "loadFailurePolicy": st.sampled_from(["fail", "recompute"]),
            },
        ),
        "metaserver": st.fixed_dictionaries({}, optional={"host": host, "port": port}),
        "proxy": st.fixed_dictionaries({}, optional={"host": host, "port": port, "adminPort": port}),
        "workload": st.fixed_dictionaries(
            {}, optional={"promptTokens": st.sampled_from([1, 10**9]), "requestsPerSecond": st.just(10.0)}
        ),
    },
)


@given(cluster)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_rule_answers_for_every_readable_file(spec: Data) -> None:
    data = {"apiVersion": "ascend-pd/v1", "kind": "PDCluster", "metadata": {"name": "x"}, "spec": spec}
    parsed = parse_spec(text_of(data))
    found = judge_spec(parsed.cluster)
    assert found == judge_spec(parsed.cluster)
    assert all(f.message and f.path.startswith("$.spec") for f in found)
    outcome = outcome_of_findings("x.yaml", found, subject_of(parsed.cluster), parsed.document)
    assert render_json([outcome], strict=False)
    assert render_plain([outcome], strict=True)
