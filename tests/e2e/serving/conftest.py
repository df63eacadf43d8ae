"""One cluster per mode for all tests of what clients are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, cpu_spec, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `one_mode` runs in pull mode alone. (To name the mode in `parametrize` would start a cluster
    for nearly every test: pytest groups by the position of a parameter, not by its value.)"""
    items[:] = [item for item in items if not (item.get_closest_marker("one_mode") and _mode(item) == "layerwise")]


def _mode(item: pytest.Item) -> object:
    return item.callspec.params.get("cluster") if isinstance(item, pytest.Function) else None


@pytest.fixture(scope="package", params=("pull", "layerwise"))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """P, D and the proxy, once per mode."""
    started = Cluster(cpu_spec(request.param), tmp_path_factory.mktemp(request.param))
    with running(started):
        yield started
