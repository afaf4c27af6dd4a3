"""The first test that needs a library compiles it, which takes longer than a test may."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILING_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(COMPILING_TIMEOUT_S))
