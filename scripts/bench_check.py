"""How long the preflight takes: judging a cluster of 512 instances, and the whole command on a small file.

Prints a Markdown table. Aims: 512 instances in under 1 s after start-up; a small file in under 0.7 s in all, with
neither torch nor vllm imported. A bare interpreter that imports pydantic is timed in the same run for comparison.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ascend_pd.check.judge import judge, subject_of  # noqa: E402
from ascend_pd.spec.load import load_parsed  # noqa: E402

ROUNDS = 9
SMALL = ROOT / "deploy/examples/cpu-1p1d.yaml"
HEAD = """\
apiVersion: ascend-pd/v1
kind: PDCluster
metadata: {name: large}
spec:
  model:
    path: /models/Qwen3-32B
    maxModelLen: 32768
    geometry:
      {layers: 64, attentionHeads: 64, kvHeads: 8, headDim: 128, hiddenSize: 5120, weightBytes: 65524246528}
  connector: {kvPort: 36000, secretFile: /etc/ascend-pd/secret, closedNetwork: true}
  proxy: {host: 0.0.0.0, port: 8000}
  pools:
"""


def pool(name: str, role: str, replicas: int, tp: int, hosts: list[str], port: int) -> str:
    return (
        f"    - {{name: {name}, role: {role}, hardware: A3, replicas: {replicas}, parallel: {{tp: {tp}}},"
        f" port: {port}, hosts: [{', '.join(hosts)}]}}\n"
    )


def hosts(first: int, count: int) -> list[str]:
    return [f"10.0.{n // 250}.{n % 250 + 1}" for n in range(first, first + count)]


def two_pools() -> str:
    """256 prefill instances of TP 8 and 256 decode instances of TP 4."""
    return (
        HEAD
        + pool("prefill", "prefill", 256, 8, hosts(0, 128), 8100)
        + pool("decode", "decode", 256, 4, hosts(128, 64), 8200)
    )


def many_pools() -> str:
    """The same as 512 pools of one instance each."""
    parts = [HEAD]
    parts += [pool(f"p{n}", "prefill", 1, 8, hosts(n // 2, 1), 8100 + n % 2) for n in range(256)]
    parts += [pool(f"d{n}", "decode", 1, 4, hosts(128 + n // 4, 1), 8200 + n % 4) for n in range(256)]
    return "".join(parts)


def check(path: Path) -> int:
    parsed = load_parsed(path)
    subject = subject_of(parsed.cluster)
    errors = [f for f in judge(subject) if f.severity == "error"]
    if errors:
        raise SystemExit(f"{path}: {errors[0]}")
    return len(subject.topology.engines)


def seconds(action: Callable[[], object]) -> list[tuple[float, float]]:
    """(wall, processor) seconds of each round: on a busy machine the second one tells more."""
    action()
    times = []
    for _ in range(ROUNDS):
        started, used = time.perf_counter(), processor_seconds()
        action()
        times.append((time.perf_counter() - started, processor_seconds() - used))
    return times


def processor_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def process(*arguments: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def row(what: str, times: list[tuple[float, float]], aim: str) -> None:
    wall = [1000 * one for one, _ in times]
    used = 1000 * statistics.median(two for _, two in times)
    middle = statistics.median(wall)
    print(f"| {what} | {middle:.0f} | {min(wall):.0f}-{max(wall):.0f} | {used:.0f} | {aim} |")


def command(path: Path) -> Callable[[], object]:
    return process("-m", "ascend_pd", "check", str(path))


def main() -> None:
    print("| what | median, ms | range, ms | processor, ms | aim, ms |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, text in (("2 pools", two_pools()), ("512 pools", many_pools())):
            path = Path(directory) / f"{name}.yaml"
            path.write_text(text)
            if (count := check(path)) != 512:
                raise SystemExit(f"{name}: {count} instances")
            in_process = seconds(lambda path=path: check(path))
            row(f"read and judge 512 instances in {name}, in process", in_process, "1000")
            row("`ascend-pd check` of the same file, whole process", seconds(command(path)), "")
    row("`ascend-pd check` of a small file, whole process", seconds(command(SMALL)), "700")
    row("`python -c 'import pydantic, yaml'`, for comparison", seconds(process("-c", "import pydantic, yaml")), "")


if __name__ == "__main__":
    main()
