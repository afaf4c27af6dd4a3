from __future__ import annotations

import pytest

from server.engine.tokenizer import Tokenizer
from server.model.loader import load_model
from server.model.network import DeepseekV4
from tests.support.checkpoints import BUNDLED


@pytest.fixture(scope="session")
def model() -> DeepseekV4:
    return load_model(BUNDLED)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)
