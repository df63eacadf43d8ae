"""One cluster per mode for all tests of what clients are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, cpu_spec, running


@pytest.fixture(scope="package", params=("pull", "layerwise"))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """P, D and the proxy, once per mode."""
    started = Cluster(cpu_spec(request.param), tmp_path_factory.mktemp(request.param))
    with running(started):
        yield started
