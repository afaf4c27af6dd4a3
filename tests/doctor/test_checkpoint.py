"""A checkpoint with one thing wrong: a file, a length, a shape, the tokenizer, the template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from server.chat.registry import chat_format
from server.doctor import checkpoint, child
from server.doctor.examination import Check, run_check
from server.doctor.findings import Finding, Level
from server.engine.tokenizer import Tokenizer
from server.node.options import BUNDLED_MODEL
from tests.doctor.support import levels, only_error, plan_of
from tests.support.byte_bpe import write_tokenizer_dir
from tests.support.quantized_checkpoints import make_quantized

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


def files(model: Path) -> list[Finding]:
    return run_check(Check("checkpoint", checkpoint.files), plan_of(model=model))


def tokenizer(model: Path, chat_format: str = "auto") -> list[Finding]:
    return list(child.ask(["tokenizer"], {"model": str(model), "chat": [chat_format, "auto", "auto"]}))


@pytest.mark.processes
def test_the_bundled_checkpoint_is_ok(model: Path) -> None:
    assert levels(files(model)) == [Level.OK]
    found = tokenizer(model)
    assert set(levels(found)) <= {Level.OK, Level.WARNING}
    assert found[1].words == str(chat_format(Tokenizer.load(model)))


def test_a_missing_file_of_an_index_is_named(model: Path) -> None:
    index = {"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "names model-2.safetensors, which is not there (1 of 2 missing)" in only_error(files(model))


def test_a_file_that_is_cut_off_is_known_by_its_header(model: Path) -> None:
    with (model / WEIGHTS).open("r+b") as file:
        file.truncate(1_000_000)
    assert f"{WEIGHTS} is not a readable safetensors file" in only_error(files(model))


@pytest.mark.processes
def test_a_wrong_shape_is_named(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors["norm.weight"] = np.zeros(3, np.float32)
    save_file(tensors, model / WEIGHTS)
    request = {"model": str(model), "draft": None, "numerics": "plain"}
    words = only_error(list(child.ask(["tensors"], request)))
    assert "norm.weight has shape [3], config.json asks for" in words


def test_a_model_that_does_not_exist_is_said_so() -> None:
    assert "there is no such directory" in only_error(files(Path("/nowhere")))


@pytest.mark.processes
def test_a_quantized_checkpoint_is_known_by_its_headers(tmp_path: Path) -> None:
    make_quantized(tmp_path, shards=2)
    (finding,) = files(tmp_path)
    assert "tensors with fp8 weights and fp4 experts, " in finding.words
    assert levels(list(child.ask(["tensors"], {"model": str(tmp_path), "draft": None, "numerics": "plain"}))) == [
        Level.OK
    ]
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F8_E4M3"', b'"F8_E5M2"', 1))
    words = only_error(list(child.ask(["tensors"], {"model": str(tmp_path), "draft": None, "numerics": "plain"})))
    assert "is stored as F8_E5M2, config.json asks for F8_E4M3" in words


def test_a_draft_that_is_not_run_is_said_so(model: Path) -> None:
    save_file({"mtp.0.main_proj.weight": np.zeros((2, 2), np.float32)}, model / "draft.safetensors")
    (finding,) = files(model)
    assert "with a DSpark draft, which is not loaded" in finding.words


@pytest.mark.processes
def test_a_broken_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in only_error(tokenizer(model))


@pytest.mark.processes
def test_more_tokens_than_rows_are_an_error(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    found = tokenizer(model)
    assert found[0].level is Level.ERROR
    assert "100 rows in the model" in found[0].words


@pytest.mark.processes
def test_a_chat_format_that_the_checkpoint_cannot_have_is_an_error(model: Path) -> None:
    bytes_alone = write_tokenizer_dir(model.parent / "bytes")
    shutil.copy(bytes_alone / "tokenizer.json", model)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (model / name).unlink(missing_ok=True)
    assert [(f.level, f.subject) for f in tokenizer(model)][1] == (Level.WARNING, "chat")
    found = tokenizer(model, "deepseek_v4")[1]
    assert found.level is Level.ERROR
    assert "does not have the tokens of DeepSeek-V4" in found.words
