"""The security options: what cannot be safe ends at the start, in one sentence, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from server.decode import launch as decode_launch
from server.prefill import launch as prefill_launch

SECRET = "0123456789abcdef" * 4
P: tuple[Callable[[list[str]], int], list[str]] = (prefill_launch.main, ["--bootstrap-port", "0"])
D: tuple[Callable[[list[str]], int], list[str]] = (decode_launch.main, ["--prefill", "127.0.0.1:1"])


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "pd.key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def said(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *options: str) -> str:
    """What a launcher says on stderr when it does not start. Its model does not exist, so that it cannot."""
    assert main([*options, "--model", "/nowhere", "--port", "0"]) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("node", [P, D], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [("short", 0o600, "at least 32"), (SECRET, 0o644, "chmod 600"), (None, 0, "No such file")],
)
def test_a_bad_key_file_ends_either_node_with_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    node: tuple[Callable[[list[str]], int], list[str]],
    content: str | None,
    mode: int,
    words: str,
) -> None:
    path = tmp_path / "pd.key"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    line = said(capsys, node[0], *node[1], "--auth-key-file", str(path))
    assert str(path) in line
    assert words in line


def test_a_prefill_node_of_another_machine_needs_a_key_or_insecure(
    capsys: pytest.CaptureFixture[str], key: Path
) -> None:
    far = ("--prefill", "10.0.0.1:8998")
    refused = said(capsys, decode_launch.main, *far)
    assert refused.startswith("launch_decode: prefill 10.0.0.1:8998 is not on this machine")
    for allowed in (["--insecure"], ["--auth-key-file", str(key)]):
        assert "/nowhere" in said(capsys, decode_launch.main, *far, *allowed), "it got as far as the model"


def test_a_key_and_insecure_exclude_each_other(capsys: pytest.CaptureFixture[str], key: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        prefill_launch.main(["--insecure", "--auth-key-file", str(key)])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:70000", ":8998"])
def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], address: str) -> None:
    with pytest.raises(SystemExit):
        decode_launch.main(["--prefill", address])
    assert "is not HOST:BOOTSTRAP_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("node", [P, D], ids=["prefill", "decode"])
def test_the_open_data_plane_is_said_at_every_start(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    node: tuple[Callable[[list[str]], int], list[str]],
    key: Path,
) -> None:
    monkeypatch.setenv("MC_MIN_RPC_PORT", "15100")
    said(capsys, node[0], *node[1], "--auth-key-file", str(key))
    (line,) = [record.message for record in caplog.records if "data plane is not protected" in record.message]
    assert "15100 to 17000" in line


def test_a_weak_api_key_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "at least 8" in said(capsys, decode_launch.main, "--local-prefill", "--api-key", "x")
    (tmp_path / "api.key").write_text("x")
    (tmp_path / "api.key").chmod(0o600)
    line = said(capsys, decode_launch.main, "--local-prefill", "--api-key-file", str(tmp_path / "api.key"))
    assert "at least 8" in line
