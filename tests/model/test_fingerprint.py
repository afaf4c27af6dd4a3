"""Nodes with equal files have equal fingerprints, however each came to read them; none reads them needlessly."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
from pathlib import Path

import pytest

from server.model import fingerprint
from server.model.config import CheckpointError
from server.model.fingerprint import default_cache_dir, model_fingerprint
from server.model.loader import load_checkpoint
from tests.support.quantized_checkpoints import make_quantized


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    make_quantized(path, shards=3)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory; files that have just been written count as settled."""
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -(1 << 62))
    return tmp_path / "cache" / "below"


class Reading:
    """How many bytes were read."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, done: int, total: int) -> None:
        assert done <= total
        self.nbytes = done


def weights_nbytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


@pytest.mark.parametrize("draft", [False, True])
def test_loading_gives_the_fingerprint_of_the_files(model: Path, draft: bool) -> None:
    """Also of a draft that is not loaded: its bytes are read for this."""
    reading = Reading()
    loaded = load_checkpoint(model, draft=draft, on_progress=reading)
    assert loaded.fingerprint == model_fingerprint(model)
    assert reading.nbytes == weights_nbytes(model)


def test_files_are_read_once_in_their_lives(model: Path, cache: Path) -> None:
    first, second = Reading(), Reading()
    expected = model_fingerprint(model)
    assert model_fingerprint(model, cache_dir=cache, on_progress=first) == expected
    assert model_fingerprint(model, cache_dir=cache, on_progress=second) == expected
    assert (first.nbytes, second.nbytes) == (weights_nbytes(model), 0)


def test_only_the_file_that_changed_is_read_again(model: Path, cache: Path) -> None:
    """Even one whose size and time of change are as before: nobody can set the time of an inode's change."""
    before = model_fingerprint(model, cache_dir=cache)
    file = sorted(model.glob("*.safetensors"))[1]
    stat, image = file.stat(), bytearray(file.read_bytes())
    image[-1] ^= 1
    file.write_bytes(image)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reading = Reading()
    after = model_fingerprint(model, cache_dir=cache, on_progress=reading)
    assert after == model_fingerprint(model) != before
    assert reading.nbytes == len(image)


def test_a_copy_elsewhere_has_the_same_fingerprint_and_digests_of_its_own(model: Path, cache: Path) -> None:
    expected = model_fingerprint(model, cache_dir=cache)
    copy, reading = Path(shutil.copytree(model, model.parent / "copy")), Reading()
    assert model_fingerprint(copy, cache_dir=cache, on_progress=reading) == expected
    assert reading.nbytes == weights_nbytes(model)


def test_a_name_or_a_config_makes_another_fingerprint(model: Path) -> None:
    before = model_fingerprint(model)
    config = model / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert model_fingerprint(model) != before


def test_a_file_that_has_just_changed_is_not_kept(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change again within the same tick of the file system's clock."""
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 1 << 62)
    for _ in range(2):
        reading = Reading()
        model_fingerprint(model, cache_dir=cache, on_progress=reading)
        assert reading.nbytes == weights_nbytes(model)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', "[" * 100_000])
def test_a_cache_that_cannot_be_used_costs_only_time(model: Path, cache: Path, content: str) -> None:
    expected = model_fingerprint(model, cache_dir=cache)
    (kept,) = cache.iterdir()
    kept.write_text(content, encoding="utf-8")
    assert model_fingerprint(model, cache_dir=cache) == expected
    shutil.rmtree(cache)
    cache.write_text("no directory")
    assert model_fingerprint(model, cache_dir=cache) == expected


def test_an_entry_that_was_tampered_with_is_not_believed(model: Path, cache: Path) -> None:
    expected = model_fingerprint(model, cache_dir=cache)
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text(encoding="utf-8").replace('"size": ', '"size": 1'), encoding="utf-8")
    assert model_fingerprint(model, cache_dir=cache) == expected


def test_a_missing_file_is_named(model: Path) -> None:
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        model_fingerprint(model)


def test_the_cache_is_where_the_user_keeps_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "dsv4-pd-server"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "dsv4-pd-server"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_account(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", no_account)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with caplog.at_level(logging.WARNING):
        assert default_cache_dir() is None
    assert "give XDG_CACHE_HOME or HOME a directory" in caplog.text
