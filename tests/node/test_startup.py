"""What keeps a node from starting: one sentence that names the option, before anything is loaded, and exit code 2."""

from __future__ import annotations

import ast
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.decode import launch as decode_launch
from server.decode import start as decode_start
from server.node.options import BUNDLED_MODEL
from server.node.ports import PortError, take_port
from server.prefill import launch as prefill_launch

ROOT = Path(__file__).resolve().parents[2]
Main = Callable[[list[str]], int]
P: Main = prefill_launch.main
D: Main = decode_launch.main
FREE = ("--port", "0")
NOWHERE = ("--model", "/nowhere")
"""Loading would fail: whatever is said instead was found before."""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], main: Main, *options: str) -> str:
    """The last line on standard error of a launcher that does not start."""
    assert main(list(options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def refused(capsys: pytest.CaptureFixture[str], main: Main, *options: str) -> str:
    """The one line that says what is wrong with the command line itself."""
    with pytest.raises(SystemExit) as ended:
        main(list(options))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_an_http_port_in_use_is_known_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], taken: int) -> None:
    expected = f"--port {taken} is in use on 127.0.0.1 by this node itself: stop that or choose another --port"
    for name, main, options in (
        ("launch_prefill", P, ["--bootstrap-port", "0"]),
        ("launch_decode", D, ["--local-prefill"]),
    ):
        assert said(capsys, main, *options, *NOWHERE, "--port", str(taken)) == f"{name}: {expected}"


def test_a_bootstrap_port_in_use_is_named(capsys: pytest.CaptureFixture[str], taken: int) -> None:
    line = said(capsys, P, *FREE, *NOWHERE, "--bootstrap-port", str(taken))
    assert line.startswith(f"launch_prefill: --bootstrap-port {taken} is in use on 127.0.0.1")


def test_one_number_for_both_ports_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, P, *NOWHERE, "--port", "41999", "--bootstrap-port", "41999")
    assert line == "launch_prefill: --port and --bootstrap-port are both 41999: give them two different ports"


def test_two_nodes_that_take_one_port_at_the_same_time_cannot_both_have_it() -> None:
    with take_port("127.0.0.1", 0, "--port") as first, pytest.raises(PortError, match="is in use"):
        take_port("127.0.0.1", first.getsockname()[1], "--port")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("10.255.255.254", "--host 10.255.255.254 is not an address of this machine"),
        ("no such host", "--host no such host: no such host"),
    ],
)
def test_a_wrong_host_is_named_and_not_the_port(capsys: pytest.CaptureFixture[str], host: str, words: str) -> None:
    line = said(capsys, D, "--local-prefill", *FREE, *NOWHERE, "--host", host)
    assert line.startswith(f"launch_decode: {words}")
    assert "--port" not in line


def test_a_transfer_host_that_nobody_is_called_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, P, *FREE, "--bootstrap-port", "0", *NOWHERE, "--transfer-host", "no such host")
    assert line.startswith("launch_prefill: --transfer-host no such host: no such host")


def test_a_model_that_does_not_exist_is_said_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no such directory" in said(capsys, D, "--local-prefill", *FREE, *NOWHERE)
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file" in said(capsys, D, "--local-prefill", *FREE, "--model", str(file))


def test_a_transport_that_cannot_be_used_is_known_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    empty = ("--model", str(tmp_path))
    assert "MC_TCP_PROTO" in said(capsys, D, "--prefill", "127.0.0.1:1", *FREE, *empty)
    assert "MC_TCP_PROTO" in said(capsys, P, "--bootstrap-port", "0", *FREE, *empty)


def test_an_error_that_nobody_foresaw_is_one_sentence_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr(decode_start, "build_resources", broken)
    line = said(capsys, D, "--local-prefill", *FREE)
    assert line == r"launch_decode: could not start: KeyError: 'two\nlines' (--log-level debug shows where)"


def test_a_broken_tokenizer_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    (model / "tokenizer.json").write_text("{")
    line = said(capsys, D, "--local-prefill", *FREE, "--model", str(model))
    assert line.startswith(f"launch_decode: {model}: the tokenizer cannot be loaded: ")


def test_memory_that_there_is_not_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, D, "--local-prefill", *FREE, "--pages", "1000000000000")
    assert "1,000,000,000,000 pages and 32 slots, about" in line
    assert "fewer --pages or --slots" in line


def modules_after(code: str) -> set[str]:
    """The modules that a new interpreter has after ``code``."""
    code += "\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_refused_at_once_needs_no_heavy_import(role: str) -> None:
    assert not modules_after(f"import server.{role}.launch") & {"torch", "fastapi", "pydantic", "transformers"}


def test_a_start_imports_neither_transformers_nor_the_compiler_of_torch() -> None:
    """Each of them would take a second of every start."""
    code = """
import server.decode.start, server.prefill.start
from server.engine.tokenizer import Tokenizer
from server.model.loader import load_model
from server.node.options import BUNDLED_MODEL
Tokenizer.load(BUNDLED_MODEL), load_model(BUNDLED_MODEL, draft=True)
"""
    assert not modules_after(code) & {"torch._dynamo", "transformers", "sympy"}


def test_no_command_line_takes_an_abbreviation() -> None:
    """``--prefil`` is a mistake, and might become another option's name."""
    for path in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "server").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".ArgumentParser", ".add_parser")):
                assert "allow_abbrev" in {keyword.arg for keyword in node.keywords}, path


@pytest.mark.parametrize(
    ("main", "options", "words"),
    [
        (D, ["--prefil", "127.0.0.1:1"], "there is no option --prefil"),
        (P, ["--bootstrap", "0"], "there is no option --bootstrap"),
        (P, ["--bootstrap-port", "70000"], "70000 is not a port"),
        (D, ["--local-prefill", "--threads", "x"], "'x' is not a whole number"),
        (D, ["--local-prefill", "--threads", "100000"], "100000 threads are more than 1024"),
        (D, ["--local-prefill", "--drain-timeout", "x"], "x is no number of seconds"),
        (D, ["--prefill", "http://127.0.0.1:8998"], "is a URL or path, not HOST:BOOTSTRAP_PORT"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], main: Main, options: list[str], words: str
) -> None:
    assert words in refused(capsys, main, *options)


def test_kernels_that_are_demanded_and_cannot_be_had_are_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_KERNELS_BUILD", "absent")
    line = said(capsys, D, "--local-prefill", *FREE, "--kernels", "cpu")
    assert line.startswith("launch_decode: --kernels cpu: DSV4_KERNELS_BUILD=absent names no build")
