"""P and D are started once per module and mode, the oracle once: 24 GiB hold one set of them beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, collocated_spec, cpu_spec, running, without_proxy

MODES = ("pull", "layerwise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "e2e":
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="session")
def collocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of one engine that prefills and decodes: the oracle."""
    cluster = without_proxy(collocated_spec(), tmp_path_factory.mktemp("collocated"))
    with running(cluster):
        yield cluster["union/0"].url


@pytest.fixture(scope="module", params=MODES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """P, D and the proxy, once per mode."""
    started = Cluster(cpu_spec(request.param), tmp_path_factory.mktemp(request.param))
    with running(started):
        yield started
