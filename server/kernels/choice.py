"""Which implementation of the network a node computes with: the kernels where they can be loaded, else Python."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.kernels import abi
from server.kernels.build import source_digest
from server.kernels.errors import KernelsUnavailable
from server.kernels.library import Library, load
from server.kernels.model import PackedModel
from server.kernels.sampling import SampleKernel
from server.model.interface import LoadedModel
from server.model.network import DeepseekV4

AUTO, CPU, PYTHON = "auto", "cpu", "python"
CHOICES = (AUTO, CPU, PYTHON)


@dataclass(frozen=True)
class Kernels:
    """What computes; ``library`` is None for the model in Python. ``reason`` says why that, in half a sentence."""

    library: Library | None
    version: str
    reason: str

    @property
    def name(self) -> str:
        return PYTHON if self.library is None else CPU

    @property
    def identity(self) -> str:
        """Equal for nodes whose results are equal bit for bit: a hash of the sources, and torch. Neither vector width
        nor threads are in it: they change no bit of the kernels.
        """
        return f"{self.name}-{self.version}"

    def sampler(self, threads: int) -> SampleKernel | None:
        """What chooses tokens on up to so many threads; None: numpy does."""
        return None if self.library is None else SampleKernel(self.library.functions, threads)

    def take(self, model: DeepseekV4) -> LoadedModel:
        """``model`` as these kernels compute it. Its weights move: it must not be used any more."""
        return model if self.library is None else PackedModel(model, self.library)


def choose_kernels(wanted: str, device: str) -> Kernels:
    """The kernels for ``wanted`` (one of :data:`CHOICES`) on ``device``.

    Raises :class:`KernelsUnavailable` if they are demanded and cannot be had.
    """
    if wanted == PYTHON:
        return _python("--kernels python")
    if device != "cpu":
        reason = f"the kernels compute on the CPU, not with --device {device}"
        if wanted == CPU:
            raise KernelsUnavailable(f"--kernels cpu: {reason}")
        return _python(reason)
    try:
        library = load()
        abi.declare(library.functions, str(library.path))
    except (KernelsUnavailable, abi.AbiMismatch) as error:
        if wanted == CPU:
            raise KernelsUnavailable(f"--kernels cpu: {error}") from error
        return _python(str(error))
    torch_version = torch.__version__.partition("+")[0]  # it computes the rotations
    version = f"{source_digest()}-torch{torch_version}"
    return Kernels(library, version, f"built for {library.target.name}")


def _python(reason: str) -> Kernels:
    return Kernels(None, f"torch{torch.__version__}", reason)
