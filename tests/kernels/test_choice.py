"""What computes where: the kernels if they can be loaded, else Python, and the reason is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from server.kernels.build import SOURCES, source_digest
from server.kernels.choice import choose_kernels
from server.kernels.errors import KernelsUnavailable
from server.kernels.library import CHOICE_VARIABLE


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "absent")


def test_python_where_it_is_asked_for() -> None:
    chosen = choose_kernels("python", "cpu")
    assert chosen.library is None
    assert (chosen.identity, chosen.reason) == (f"python-torch{torch.__version__}", "--kernels python")


def test_python_on_another_device() -> None:
    assert choose_kernels("auto", "cuda").name == "python"
    with pytest.raises(
        KernelsUnavailable, match="--kernels cpu: the kernels compute on the CPU, not with --device cuda"
    ):
        choose_kernels("cpu", "cuda")


@pytest.mark.usefixtures("without_library")
def test_without_a_library_python_computes_and_says_why() -> None:
    chosen = choose_kernels("auto", "cpu")
    assert chosen.library is None
    assert chosen.reason.startswith(f"{CHOICE_VARIABLE}=absent names no build")
    with pytest.raises(KernelsUnavailable, match=f"--kernels cpu: {CHOICE_VARIABLE}=absent names no build"):
        choose_kernels("cpu", "cpu")


def test_kernels_of_other_sources_have_another_identity(tmp_path: Path) -> None:
    """Nodes of different kernels refuse each other by name, without anybody having to raise a number."""
    chosen = choose_kernels("cpu", "cpu")
    assert chosen.identity == f"cpu-{source_digest()}-torch{torch.__version__.partition('+')[0]}"
    copied = tmp_path / "src"
    shutil.copytree(SOURCES, copied)
    assert source_digest(sources=copied) == source_digest()
    changed = copied / "norm.h"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert source_digest(sources=copied) != source_digest()
