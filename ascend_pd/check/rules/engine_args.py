"""`extraArgs` contradicts the file.

Parallel sizes, ports, the model, its types and lengths, and the KV transfer configuration are written from the
file. A second value in `extraArgs` would win over the first inside vLLM, unseen by every other rule and by the
other end.

Fix: set the value in the file, where the message says.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.arguments import flags_of
from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.spec.cluster import Role

NAME = "engine-args"
SEVERITY = "error"
ZH = """`extraArgs` 与文件矛盾。

并行度、端口、模型及其类型与长度、KV 传输配置都由文件写出。`extraArgs` 中的第二个值会在 vLLM 内部胜出，而其他
规则和另一端都看不到。

处理：按提示在文件中的相应位置设置。
"""
OWNED = {
    "--model": "spec.model.path",
    "--served-model-name": "spec.model.servedName",
    "--max-model-len": "spec.model.maxModelLen",
    "--dtype": "spec.model.dtype",
    "--kv-cache-dtype": "spec.model.kvCacheDtype",
    "--block-size": "spec.engine.blockSize",
    "--tensor-parallel-size": "parallel.tp",
    "--pipeline-parallel-size": "parallel.pp",
    "--data-parallel-size": "parallel.dp",
    "--enable-expert-parallel": "parallel.ep",
    "--gpu-memory-utilization": "memoryFraction",
    "--max-num-batched-tokens": "maxNumBatchedTokens",
    "--port": "port",
    "--host": "hosts",
    "--kv-transfer-config": "spec.connector",
}
"""Flag → where the file says it."""
DERIVED = frozenset(
    {
        "--data-parallel-rank",
        "--data-parallel-start-rank",
        "--data-parallel-size-local",
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-backend",
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--headless",
        "--master-addr",
        "--master-port",
        "--nnodes",
        "--node-rank",
        "--api-server-count",
    }
)
"""Computed from the topology."""


def _given(pool: Pool, flag: str) -> str:
    spec = pool.spec
    values = {
        "--tensor-parallel-size": spec.parallel.tp,
        "--pipeline-parallel-size": spec.parallel.pp,
        "--data-parallel-size": spec.parallel.dp,
        "--max-model-len": pool.max_model_len,
        "--block-size": pool.block_size,
        "--port": spec.port,
        "--model": pool.model_path,
    }
    return str(values.get(flag, ""))


def check(subject: Subject) -> Iterator[Finding]:
    """The engine's arguments once, then each pool's own."""
    first = subject.pools[0]
    yield from _judge(first, "$.spec.engine.extraArgs", flags_of(subject.spec.engine.extra_args))
    for pool in subject.pools:
        yield from _judge(pool, f"{pool.path}.extraArgs", flags_of(pool.spec.extra_args))
        if pool.is_npu and pool.spec.role is Role.DECODE:
            own = "--async-scheduling" in flags_of(pool.spec.extra_args)
            if own or "--async-scheduling" in flags_of(subject.spec.engine.extra_args):
                path = f"{pool.path}.extraArgs" if own else "$.spec.engine.extraArgs"
                message = "--async-scheduling on decode: vLLM 0.23 frees blocks that a running step still writes"
                yield error(NAME, path, message, "remove it; ascend-pd starts decode with --no-async-scheduling")


def _judge(pool: Pool, path: str, flags: dict[str, str]) -> Iterator[Finding]:
    for flag, value in flags.items():
        name = flag.partition(".")[0]
        if name in DERIVED:
            yield error(NAME, path, f"{flag} is computed from the topology", "remove it")
        elif name in OWNED:
            where = OWNED[name]
            if value and value == _given(pool, name):
                yield warning(NAME, path, f"{flag} {value} repeats {where}", "remove it")
            else:
                yield error(
                    NAME, path, f"{flag} {value}".rstrip() + f" contradicts {where}", f"set {where} instead"
                )
