"""Made checkpoints: what is in them, that their formats stand for the same values, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_making.formats import formats_of, row_chunks, scale_of
from checkpoint_making.main import main
from checkpoint_making.releases import NAMES, config_of_release
from safetensors.torch import load_file

from server.model.config import load_config
from server.model.official_tensors import official_tensors
from server.model.quantization import dequantize_fp4, dequantize_fp8, quantize_fp4, quantize_fp8
from server.model.tensor_files import tensor_files, tensor_headers
from server.node.options import BUNDLED_MODEL
from tests.support.checkpoints import VOCAB_SIZE

SMALL = (
    "num_hidden_layers=4",
    "hidden_size=160",
    "n_routed_experts=8",
    "num_experts_per_tok=2",
    "num_attention_heads=4",
    "o_groups=2",
    "o_lora_rank=72",
    "q_lora_rank=96",
    "head_dim=40",
    "qk_rope_head_dim=8",
    "index_head_dim=24",
    "index_n_heads=8",
    "moe_intermediate_size=144",
    "vocab_size=600",
    "rope_scaling.original_max_position_embeddings=512",
)
"""Odd sizes: no width is a multiple of 128."""


def make(output: Path, *options: str, config: str = "flash", changes: tuple[str, ...] = SMALL) -> Path:
    sets = [word for change in changes for word in ("--set", change)]
    assert main([str(output), "--config", config, *sets, *options]) == 0
    return output


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in tensor_files(folder) for key, tensor in load_file(file).items()}


def plain(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What quantized tensors stand for, by the key of the weight."""
    values = {}
    for key, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            values[key] = dequantize_fp8(tensor, stored[scale_of(key)])
        elif tensor.dtype == torch.int8:
            values[key] = dequantize_fp4(tensor, stored[scale_of(key)])
        elif tensor.dtype != torch.float8_e8m0fnu:
            values[key] = tensor
    return values


@pytest.mark.parametrize("draft", ["nextn", "dspark", "none"])
@pytest.mark.parametrize("form", ["official", "base", "bf16"])
def test_a_checkpoint_has_the_tensors_of_its_config(tmp_path: Path, form: str, draft: str) -> None:
    folder = make(tmp_path / "made", "--format", form, "--draft", draft, "--shard-size", "400kB")
    wanted = official_tensors(load_config(folder), draft=draft != "none")
    assert {h.key: (h.shape, h.dtype) for h in tensor_headers(folder)} == {
        key: (spec.shape, spec.dtype) for key, spec in wanted.items()
    }
    assert len(tensor_files(folder)) > 1
    raw = json.loads((folder / "config.json").read_text())
    assert raw.get("expert_dtype") == {"official": "fp4", "base": "fp8", "bf16": None}[form]
    assert len(raw["compress_ratios"]) == 4 + {"nextn": 1, "dspark": 3, "none": 0}[draft]


def test_plain_formats_hold_what_the_official_one_stands_for(tmp_path: Path) -> None:
    official = plain(tensors(make(tmp_path / "official")))
    for form, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found = tensors(make(tmp_path / form, "--format", form))
        assert found.keys() == official.keys()
        assert found["layers.3.ffn.experts.7.w2.weight"].dtype == dtype
        for key, tensor in found.items():
            assert torch.equal(tensor.double(), official[key].double()), key


def test_the_same_seed_makes_the_same_files_and_another_one_others(tmp_path: Path) -> None:
    first, again, other = (
        make(tmp_path / name, "--seed", seed) for name, seed in (("first", "3"), ("again", "3"), ("other", "4"))
    )
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    a, b = tensors(first), tensors(other)
    assert not [key for key in a if torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)) and len(a[key]) > 8]


def test_values_keep_activations_near_one(tmp_path: Path) -> None:
    values = plain(tensors(make(tmp_path / "made", "--draft", "dspark")))
    for key, tensor in values.items():
        if tensor.dim() == 2 and tensor.dtype != torch.int64 and tensor.numel() > 1000 and not key.endswith("ape"):
            assert 0.4 < tensor.float().std() * tensor.shape[1] ** 0.5 < 2.5, key
        elif key.endswith("norm.weight"):
            assert 0.5 < tensor.float().min() <= tensor.float().max() < 1.6, key
    chosen = values["layers.0.ffn.gate.tid2eid"]
    assert chosen.max() == 7
    assert all(len(set(row)) == len(row) for row in chosen.tolist())


def test_the_bundled_checkpoint_becomes_an_official_one(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert main([str(made), "--from", str(BUNDLED_MODEL), "--shard-size", "300kB"]) == 0
    source, found = tensors(BUNDLED_MODEL), tensors(made)
    table = official_tensors(load_config(made))
    assert found.keys() == table.keys()
    forms = formats_of(table)
    for key, tensor in source.items():
        if key in forms:
            codes, scale = (quantize_fp8 if forms[key] == "fp8" else quantize_fp4)(tensor)
            assert torch.equal(codes.view(torch.uint8), found[key].view(torch.uint8)), key
            assert torch.equal(scale.view(torch.uint8), found[scale_of(key)].view(torch.uint8)), key
        else:
            assert torch.equal(tensor.to(found[key].dtype), found[key]), key
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (made / name).read_bytes() == (BUNDLED_MODEL / name).read_bytes()


def test_a_quantized_checkpoint_becomes_a_plain_one(tmp_path: Path) -> None:
    official = make(tmp_path / "official")
    assert main([str(tmp_path / "plain"), "--from", str(official), "--format", "fp32", "--draft", "none"]) == 0
    wanted, found = plain(tensors(official)), tensors(tmp_path / "plain")
    assert found.keys() == {key for key in wanted if not key.startswith("mtp.")}
    for key, tensor in found.items():
        assert torch.equal(tensor.double(), wanted[key].double()), key


def test_rows_of_several_chunks_have_their_own_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized 128 rows at a time, against the whole weight quantized at once."""
    plain_one = make(tmp_path / "plain", "--format", "fp32")
    monkeypatch.setattr("checkpoint_making.formats.CHUNK_VALUES", 1)
    assert main([str(tmp_path / "made"), "--from", str(plain_one)]) == 0
    source, found = tensors(plain_one), tensors(tmp_path / "made")
    forms = formats_of(official_tensors(load_config(tmp_path / "made")))
    assert {"fp8", "fp4"} == set(forms.values())
    for key, form in forms.items():
        codes, scale = (quantize_fp8 if form == "fp8" else quantize_fp4)(source[key])
        assert torch.equal(codes.view(torch.uint8), found[key].view(torch.uint8)), key
        assert torch.equal(scale.view(torch.uint8), found[scale_of(key)].view(torch.uint8)), key


def test_rows_are_cut_between_blocks() -> None:
    width = 1 << 14
    chunks = list(row_chunks(700, width))
    assert [chunk.start % 128 for chunk in chunks] == [0] * len(chunks)
    assert [i for chunk in chunks for i in chunk] == list(range(700))
    assert len(chunks) == 3


@pytest.mark.parametrize(
    ("config", "draft", "n_tensors", "nbytes"),
    [
        ("flash", "nextn", "69,187", "159,609,485,896"),
        ("pro", "nextn", "145,116", "864,704,792,696"),
        ("flash", "dspark", "72,317", "166,878,536,440"),
        ("pro", "dspark", "149,782", "892,727,580,904"),
    ],
)
def test_the_list_ends_with_the_totals_of_the_published_checkpoints(
    capsys: pytest.CaptureFixture[str], config: str, draft: str, n_tensors: str, nbytes: str
) -> None:
    assert main(["--list", "--config", config, "--draft", draft]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["all", n_tensors, nbytes]
    assert any(line.startswith("layers.*.ffn.experts.*.w1.weight ") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_the_configs_of_the_releases_are_the_official_ones(name: str) -> None:
    official = Path(__file__).parents[4] / "shared" / "data" / "dsv4"
    if not official.is_dir():
        pytest.skip("the official configs are not beside this checkout")
    expected = json.loads((official / name / "config.json").read_text())
    assert config_of_release(name) == {"expert_dtype": "fp4"} | expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", "nowhere"], "there is no nowhere: give --config a directory, a config.json, or flash or pro"),
        (["--config", "flash", "--set", "hiden_size=3"], "--set hiden_size=3: give FIELD=VALUE, a field"),
        (["--config", "flash", "--set", "rope_scaling.x=3"], "--set rope_scaling.x=3: give FIELD=VALUE, a field"),
        (["--config", "flash", "--set", "hidden_size=0"], "config.json: hidden_size is 0; allowed is"),
        (["--config", "flash", "--set", "num_hidden_layers=2"], "num_hash_layers is 3; it may be at most"),
        (["--config", "flash", "--set", "num_hidden_layers=50"], "compress_ratios has 44 entries"),
        (["--config", "flash", "--tokenizer", "/nowhere"], "--tokenizer /nowhere: there is no tokenizer.json"),
        (
            ["--config", "flash", "--set", "vocab_size=3", "--tokenizer", str(BUNDLED_MODEL)],
            f"{VOCAB_SIZE:,} tokens, vocab_size is 3",
        ),
        (["--config", "pro"], "made needs 805.3 GiB, the disk has 1 MiB free"),
    ],
)
def test_what_cannot_be_made_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert main([str(tmp_path / "made"), *options]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert main([str(tmp_path), "--config", "flash"]) == 2
    assert f"{tmp_path} is there already" in capsys.readouterr().err


def test_quantized_weights_are_not_quantized_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    official = make(tmp_path / "official")
    assert main([str(tmp_path / "again"), "--from", str(official), "--format", "base"]) == 2
    assert "is quantized already: only --format bf16 and fp32 can be made from it" in capsys.readouterr().err


def test_a_source_that_is_no_checkpoint_of_its_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path / "source", "--format", "fp32")
    raw: dict[str, Any] = json.loads((source / "config.json").read_text())
    for changes, words in (
        ({"moe_intermediate_size": 128}, "w1.weight has shape [144, 160], config.json asks for [128, 160]"),
        ({"n_routed_experts": 9}, "has shape [8, 160], config.json asks for [9, 160]"),
        ({"num_nextn_predict_layers": 0}, "mtp.0.attn.attn_sink is not in a checkpoint of this config.json"),
    ):
        (source / "config.json").write_text(json.dumps(raw | changes))
        assert main([str(tmp_path / "made"), "--from", str(source)]) == 2
        assert words in capsys.readouterr().err


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("checkpoint_making.making.write_tensors", fails)
    assert main([str(tmp_path / "made"), "--from", str(BUNDLED_MODEL)]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", ["0", "0.5", "much"])
def test_a_shard_without_bytes_is_refused(tmp_path: Path, nbytes: str) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "made"), "--from", str(BUNDLED_MODEL), "--shard-size", nbytes])
    assert list(tmp_path.iterdir()) == []
