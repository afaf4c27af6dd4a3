"""Settings of every test: no wall-clock limits inside hypothesis (machines are noisy), one CPU thread per operation.

What starts processes or whole nodes is marked, so that ``scripts/test --fast`` can leave it out.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin at every barrier are slow on a busy machine

import pytest
import torch
from hypothesis import settings

from server.engine.tokenizer import Tokenizer
from server.model.interface import LoadedModel
from server.node.options import BUNDLED_MODEL
from tests.support.models import load

# Under nohup, or in the background of a script, these are ignored, and every process that a test starts inherits that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# As Ctrl-C: the tests end, and with them what they have started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


HERE = Path(__file__).parent
WITH_PROCESSES = ("e2e", "nodes", "transfer_engines", "test_docker.py", "test_packaging.py")
"""Folders and files in which every test is marked; others mark their own."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in WITH_PROCESSES:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """The bundled model, without its draft layer, for whatever a node would compute with here."""
    return load(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)
