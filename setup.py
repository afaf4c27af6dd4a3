"""Builds the CPU kernels with the package: into the wheel, or beside their sources for an editable install."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from server.kernels.build import BUILT, SOURCES, NoCompiler, find_compiler  # noqa: E402
from server.kernels.build import build as build_libraries  # noqa: E402


def has_compiler() -> bool:
    try:
        find_compiler()
    except NoCompiler:
        return False
    return True


class BuildKernels(Command):
    """A step of ``build``: see setuptools.command.build.SubCommand for what it must offer."""

    editable_mode = False
    build_lib: str | None = None

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if not has_compiler():
            self.warn("no C++ compiler (CXX, else g++): installing without CPU kernels; the model in Python will run")
            return
        paths = build_libraries()
        if not self.editable_mode:
            folder = Path(self.build_lib or "", "server", "kernels", BUILT.name)
            shutil.rmtree(folder, ignore_errors=True)  # a build folder that was left may hold older ones
            folder.mkdir(parents=True)
            for path in paths:
                shutil.copy2(path, folder)

    def get_source_files(self) -> list[str]:
        return [os.path.relpath(path, ROOT) for path in sorted(SOURCES.iterdir()) if path.is_file()]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class KernelDistribution(Distribution):
    """With kernels it belongs to one platform."""

    def has_ext_modules(self) -> bool:
        return has_compiler()


class PlatformWheel(bdist_wheel):
    """The kernels know nothing of Python: one wheel of a platform is for every version of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


build.sub_commands.append(("build_kernels", None))
setup(
    distclass=KernelDistribution,
    cmdclass={"build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
)
