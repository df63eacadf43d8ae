"""P and D are started once per module or package and mode, the oracle once: 24 GiB hold one set of them beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import collocated_spec, running, without_proxy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="session")
def collocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of one engine that prefills and decodes: the oracle."""
    cluster = without_proxy(collocated_spec(), tmp_path_factory.mktemp("collocated"))
    with running(cluster):
        yield cluster["union/0"].url
