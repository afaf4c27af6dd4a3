"""scripts/setup and scripts/test as far as they run without installing anything: refusals, the stamp, the lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """\
#!/bin/sh
# Stands for the interpreter of a finished .venv: says what it is asked to do and does nothing.
case "$*" in
  -V) echo "Python 3.11.99" ;;
  *"pip show"*|*" -qq show"*) exit 1 ;;
  *) echo "$*" >>"{log}"; {behaviour} ;;
esac
"""


class Checkout:
    """A copy of what scripts/setup reads, with a stand-in interpreter in .venv."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "python.log"
        (root / "scripts").mkdir(parents=True)
        for name in (
            "scripts/setup",
            "scripts/test",
            "scripts/quickstart",
            "setup.py",
            "pyproject.toml",
            "constraints.txt",
        ):
            shutil.copy(ROOT / name, root / name)
        (root / ".venv" / "bin").mkdir(parents=True)
        self.python("exit 0")

    def python(self, behaviour: str) -> None:
        path = self.root / ".venv" / "bin" / "python"
        path.write_text(FAKE_PYTHON.format(log=self.log, behaviour=behaviour))
        path.chmod(0o755)

    def setup(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts" / "setup", *args],
            env={**os.environ, "PYTHON": sys.executable, **env},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def installs(self) -> list[str]:
        """The pip installs so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if " install " in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a folder")


def test_second_run_does_nothing(checkout: Checkout) -> None:
    first = checkout.setup()
    assert first.returncode == 0, first.stderr
    assert "installing" in first.stderr
    (install,) = checkout.installs()
    assert install.endswith("-c constraints.txt -e .[cpu,dev,routers]")
    started = time.monotonic()
    second = checkout.setup()
    assert time.monotonic() - started < 20
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(checkout.installs()) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_dependency_file_is_installed_again(checkout: Checkout, name: str) -> None:
    checkout.setup()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.setup().returncode == 0
    assert len(checkout.installs()) == 2


def test_other_extras_are_installed_and_named_by_option_or_variable(checkout: Checkout) -> None:
    checkout.setup()
    assert checkout.setup("--extras", "cuda,dev").returncode == 0
    assert checkout.setup(SETUP_EXTRAS="cpu").returncode == 0
    assert [line.split()[-1] for line in checkout.installs()] == [".[cpu,dev,routers]", ".[cuda,dev]", ".[cpu]"]


def test_a_moved_checkout_is_installed_again(checkout: Checkout) -> None:
    checkout.setup()
    moved = checkout.root.with_name("elsewhere")
    checkout.root.rename(moved)
    checkout.root = moved
    checkout.log = moved / "python.log"
    checkout.log.unlink()
    checkout.python("exit 0")
    assert checkout.setup().returncode == 0
    assert len(checkout.installs()) == 1


def test_a_failed_install_leaves_no_stamp(checkout: Checkout) -> None:
    checkout.python('case "$*" in *" install "*) exit 1 ;; esac')
    assert checkout.setup().returncode == 1
    assert not (checkout.root / ".venv" / ".setup-stamp").exists()
    checkout.python("exit 0")
    assert checkout.setup().returncode == 0


def test_a_failed_install_takes_back_the_stamp_of_an_earlier_one(checkout: Checkout) -> None:
    checkout.setup()
    pins = checkout.root / "constraints.txt"
    before = pins.read_text()
    pins.write_text(before + "# changed\n")
    checkout.python('case "$*" in *" install "*) exit 1 ;; esac')
    assert checkout.setup().returncode == 1
    pins.write_text(before)
    checkout.python("exit 0")
    assert checkout.setup().returncode == 0
    assert len(checkout.installs()) == 3


def test_a_wheel_that_does_not_load_is_an_error_with_advice(checkout: Checkout) -> None:
    checkout.python('case "$*" in *mooncake.engine*) exit 1 ;; esac')
    done = checkout.setup("--extras", "cuda,dev")
    assert done.returncode == 1
    assert "NVIDIA driver" in done.stderr
    assert not (checkout.root / ".venv" / ".setup-stamp").exists()


def test_concurrent_runs_install_once(checkout: Checkout) -> None:
    checkout.python('case "$*" in *" install "*) sleep 1 ;; esac')
    script = checkout.root / "scripts" / "setup"
    env = {**os.environ, "PYTHON": sys.executable}
    running = [subprocess.Popen([script], env=env, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(checkout.installs()) == 1
    assert sum("waiting" in text for text in said) == 2


@pytest.mark.parametrize(
    ("args", "env", "reason"),
    [
        (["--extras", "cpu,cuda"], {}, "choose one"),
        (["--extras", "dev"], {}, "name cpu or cuda"),
        (["--extras"], {}, "--extras needs a list"),
        (["--faster"], {}, "unknown option --faster"),
        ([], {"PYTHON": "/bin/false"}, "not a working Python 3.11"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    checkout: Checkout, args: list[str], env: dict[str, str], reason: str
) -> None:
    done = checkout.setup(*args, **env)
    assert done.returncode == 2
    assert reason in done.stderr
    assert checkout.installs() == []


def test_missing_libraries_without_root_say_what_to_run(checkout: Checkout, tmp_path: Path) -> None:
    script = checkout.root / "scripts" / "setup"
    script.write_text(script.read_text().replace("libibverbs.so.1", "libabsent-for-the-test.so.1"))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("id", "echo 1000"), ("sudo", "exit 1"), ("apt-get", "exit 99")):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    done = checkout.setup(PATH=f"{commands}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "libabsent-for-the-test.so.1" in done.stderr
    assert "apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4" in done.stderr
    assert checkout.installs() == []


def test_root_installs_missing_libraries_with_apt(checkout: Checkout, tmp_path: Path) -> None:
    script = checkout.root / "scripts" / "setup"
    script.write_text(script.read_text().replace("libnuma.so.1", "libabsent-for-the-test.so.1"))
    commands = tmp_path / "bin"
    commands.mkdir()
    called = tmp_path / "apt.log"
    for name, text in (("id", "echo 0"), ("apt-get", f'echo "$*" >>{called}')):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    done = checkout.setup(PATH=f"{commands}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert called.read_text().splitlines()[-1].endswith("--no-install-recommends libibverbs1 libnuma1 libcurl4")


def test_an_updated_checkout_compiles_its_kernels_and_installs_nothing(checkout: Checkout) -> None:
    checkout.setup()
    checkout.log.unlink()
    assert checkout.setup().returncode == 0
    assert checkout.log.read_text().splitlines() == ["-m server.kernels.build"]


def test_kernels_that_do_not_compile_are_an_error_and_leave_no_stamp(checkout: Checkout) -> None:
    checkout.python('case "$*" in *server.kernels.build*) echo "bad.cpp:1: error" >&2; exit 1 ;; esac')
    done = checkout.setup()
    assert done.returncode == 1
    assert "bad.cpp:1: error" in done.stderr
    assert "the CPU kernels do not compile" in done.stderr
    assert not (checkout.root / ".venv" / ".setup-stamp").exists()


@pytest.mark.parametrize(
    ("who", "compiler", "installs"),
    [("echo 0", None, True), ("echo 1000", None, False), ("echo 0", "", False), ("echo 0", "clang++", False)],
    ids=["root", "no rights", "none wanted", "another one"],
)
def test_a_missing_compiler_is_installed_where_it_may_be_and_is_no_error(
    checkout: Checkout, tmp_path: Path, who: str, compiler: str | None, installs: bool
) -> None:
    script = checkout.root / "scripts" / "setup"
    script.write_text(script.read_text().replace("command -v g++", "command -v absent-for-the-test"))
    commands = tmp_path / "bin"
    commands.mkdir()
    called = tmp_path / "apt.log"
    for name, text in (("id", who), ("sudo", "exit 1"), ("apt-get", f'echo "$*" >>{called}; exit 9')):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    env = {} if compiler is None else {"CXX": compiler}
    done = checkout.setup(PATH=f"{commands}:{os.environ['PATH']}", **env)
    assert done.returncode == 0, done.stderr
    assert called.exists() == installs
    assert ("could not install g++" in done.stderr) == installs


def test_torch_can_come_from_another_index_and_everything_else_from_the_usual_one(checkout: Checkout) -> None:
    index = "https://builds.example/cpu"
    done = checkout.setup(TORCH_INDEX_URL=index)
    assert done.returncode == 0, done.stderr
    torch, everything = checkout.installs()
    assert torch.endswith(f"install --index-url {index} --no-deps -c constraints.txt torch")
    assert "index" not in everything
    assert "190 MB" in done.stderr


def test_the_size_of_the_download_is_said_before_it_begins_and_its_progress_shown(checkout: Checkout) -> None:
    checkout.python('case "$*" in *" install "*) echo "progress of: $*" ;; esac')
    done = checkout.setup()
    said = done.stderr
    assert said.index("several GB to download") < said.index("progress of: -m pip")
    assert "TORCH_INDEX_URL" in said
    assert done.stdout == ""
    assert not any(" -q" in line for line in checkout.installs()), "pip shows its progress"
    (checkout.root / ".venv" / "lib" / "python3.11" / "site-packages" / "torch").mkdir(parents=True)
    assert "several GB" not in checkout.setup("--extras", "cpu").stderr, "torch is there already"


@pytest.mark.parametrize("script", ["setup", "test", "quickstart"])
def test_help_comes_without_doing_anything(checkout: Checkout, script: str) -> None:
    shown = subprocess.run(
        [checkout.root / "scripts" / script, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"scripts/{script}" in shown.stdout
    assert "set -euo" not in shown.stdout
    assert checkout.installs() == []


def test_an_unknown_option_of_the_test_command_is_refused(checkout: Checkout) -> None:
    done = subprocess.run([checkout.root / "scripts" / "test", "--quick"], capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
