"""Rendered Kubernetes YAML against golden files; `python -m tests.unit.manifests.test_render` writes them anew."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascend_pd.check import judge_spec
from ascend_pd.cli import main
from ascend_pd.errors import OperatorError
from ascend_pd.manifests import ManifestSettings, place, render
from ascend_pd.manifests.engines import start_script
from ascend_pd.spec.load import load_spec
from ascend_pd.spec.parse import parse_spec
from ascend_pd.spec.topology import derive_topology
from tests.unit.spec.texts import cluster, pool

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "deploy" / "examples"
GOLDEN = ROOT / "tests" / "unit" / "golden" / "manifests"
CLUSTERS = ("k8s-a3-qwen3-32b", "k8s-cpu-1p1d")
SETTINGS = ManifestSettings(
    namespace="llm", npu_image="e:1", cpu_image="c:1", proxy_image="p:1", metaserver_image="m:1"
)

Object = dict[str, Any]


def rendered(name: str) -> dict[str, str]:
    return render(load_spec(EXAMPLES / f"{name}.yaml"), SETTINGS)


def objects(files: dict[str, str]) -> list[Object]:
    return [
        found for name, text in files.items() if name != "kustomization.yaml" for found in yaml.safe_load_all(text)
    ]


def of_kind(files: dict[str, str], kind: str) -> list[Object]:
    return [found for found in objects(files) if found["kind"] == kind]


@pytest.mark.parametrize("name", CLUSTERS)
def test_an_example_renders_to_its_golden_files(name: str) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (GOLDEN / name).glob("*.yaml")}
    assert rendered(name) == kept


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_placed_file_reads_back_passes_the_check_and_names_every_pod(name: str) -> None:
    files = rendered(name)
    (config,) = of_kind(files, "ConfigMap")
    placed = parse_spec(config["data"]["cluster.yaml"]).cluster
    assert [f for f in judge_spec(placed) if f.severity == "error"] == []
    pods = {
        f"{s['metadata']['name']}-{n}.{s['spec']['serviceName']}"
        for s in of_kind(files, "StatefulSet")
        for n in range(s["spec"]["replicas"])
    }
    assert set(derive_topology(placed).hosts) == pods


@pytest.mark.parametrize("name", CLUSTERS)
def test_selectors_match_and_names_are_unique(name: str) -> None:
    files = rendered(name)
    found = objects(files)
    keys = [(o["kind"], o["metadata"]["name"]) for o in found]
    assert len(keys) == len(set(keys))
    assert {o["metadata"]["namespace"] for o in found} == {"llm"}
    templates = [o["spec"]["template"] for o in found if o["kind"] in ("StatefulSet", "Deployment")]
    for o in found:
        if o["kind"] == "Service":
            wanted = o["spec"]["selector"].items()
            assert any(wanted <= t["metadata"]["labels"].items() for t in templates)
        if o["kind"] in ("StatefulSet", "Deployment"):
            wanted = o["spec"]["selector"]["matchLabels"].items()
            assert wanted <= o["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_mount_has_its_volume_and_no_secret_is_written_down(name: str) -> None:
    files = rendered(name)
    assert of_kind(files, "Secret") == []
    for kind in ("StatefulSet", "Deployment"):
        for found in of_kind(files, kind):
            pod = found["spec"]["template"]["spec"]
            volumes = {v["name"] for v in pod["volumes"]}
            mounts = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
            assert mounts == volumes


def test_each_node_gets_one_pod_with_its_devices_and_its_engines() -> None:
    npu = {"hardware": "A3", "parallel": {"tp": 1, "dp": 32, "ep": True}}
    spec = cluster(pool("p", "prefill", 8100, **npu), pool("d", "decode", 8200, **npu))
    sets = of_kind(render(spec, ManifestSettings()), "StatefulSet")
    assert [(s["metadata"]["name"], s["spec"]["replicas"]) for s in sets] == [("test-p-0", 2), ("test-d-0", 2)]
    (container,) = sets[1]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"huawei.com/Ascend910": 16}
    assert sets[1]["spec"]["template"]["metadata"]["annotations"] == {"sp-block": "32"}


def script_of(**parallel: int) -> str:
    spec = cluster(pool("p", "prefill", 8100, hardware="A2", parallel=parallel), pool("d", "decode", 8200))
    return start_script(derive_topology(place(spec)).replicas[0])


def test_a_pod_starts_the_engines_that_the_topology_places_there() -> None:
    assert re.findall(r"(\d+)\) engines='(.*)'", script_of(tp=4, dp=3)) == [("0", "0:0 1:0"), ("1", "2:0")]
    assert re.findall(r"(\d+)\) engines='(.*)'", script_of(tp=8, pp=2)) == [("0", "0:0"), ("1", "0:1")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("host", "code", "started"), [("x-p-0-1", 7, ["2"]), ("x-p-0-0", 7, ["0", "1"])])
def test_the_start_script_ends_with_the_first_engine_that_ends(
    tmp_path: Path, host: str, code: int, started: list[str]
) -> None:
    fake = tmp_path / "ascend-pd"
    fake.write_text(
        "#!/bin/bash\nrank=$(sed 's/.*--dp-rank \\([0-9]*\\).*/\\1/' <<< \"$*\")\n"
        f'touch {tmp_path}/started-$rank\nif [ "$rank" = 1 ] || [ "$rank" = 2 ]; then sleep 0.3; exit 7; fi\n'
        "exec sleep 60\n"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script_of(tp=4, dp=3)],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", "HOSTNAME": host},
        timeout=30,
        check=False,
    )
    assert done.returncode == code
    assert sorted(p.name.removeprefix("started-") for p in tmp_path.glob("started-*")) == started


def test_pull_mode_has_no_metaserver_and_layerwise_has_one() -> None:
    assert "20-metaserver.yaml" not in rendered("k8s-cpu-1p1d")
    assert "20-metaserver.yaml" in rendered("k8s-a3-qwen3-32b")


def test_the_kustomization_lists_every_file() -> None:
    files = rendered("k8s-a3-qwen3-32b")
    listed = yaml.safe_load(files["kustomization.yaml"])["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(files)


def test_named_machines_and_names_too_long_are_refused() -> None:
    with pytest.raises(OperatorError, match="leave hosts out"):
        place(cluster(pool("p", "prefill", 8100, hosts=["a"]), pool("d", "decode", 8200)))
    with pytest.raises(OperatorError, match="names of 64 characters, 63 at most"):
        place(cluster(pool("p" * 55, "prefill", 8100), pool("d", "decode", 8200)))


def test_the_command_writes_the_files_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(EXAMPLES / "k8s-cpu-1p1d.yaml")
    assert main(["manifests", spec, "-o", str(tmp_path / "out"), "--namespace", "llm", "--cpu-image", "c:1"]) == 0
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == sorted(str(p) for p in (tmp_path / "out").iterdir())
    assert "image: c:1" in (tmp_path / "out" / "10-pool-prefill.yaml").read_text()


def test_the_command_refuses_what_pods_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On loopback this file needs no secret; between pods it does."""
    assert main(["manifests", str(EXAMPLES / "cpu-1p1d.yaml"), "-o", str(tmp_path / "out")]) == 1
    assert "secret: $.spec.connector.secretFile" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


if __name__ == "__main__":
    for each in CLUSTERS:
        directory = GOLDEN / each
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file, content in rendered(each).items():
            (directory / file).write_text(content, encoding="utf-8")
