"""``python -m cuda_check.section NAME DEVICE``: one section as a process, which writes a line of JSON for each finding.

Exit codes: 0 it came to its end; 1 it did not (the last line of standard error says why); 3 there is no such device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from cuda_check import pair, parity, speed, waiting
from cuda_check.lines import Line
from server.node.checks import DeviceUnavailable, check_device
from server.transfer.engines.mooncake import installed_wheel

NO_DEVICE = 3


def facts(device: torch.device) -> Iterator[Line]:
    """What the other sections ran on."""
    wheel = installed_wheel()
    yield Line("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    yield Line("Mooncake", f"{wheel.name} {wheel.version}")
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        capability = f"compute capability {of.major}.{of.minor}"
        yield Line(str(device), f"{of.name}, {capability}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")


SECTIONS: dict[str, Callable[[torch.device], Iterator[Line]]] = {
    "facts": facts,
    "parity": parity.check,
    "waiting": waiting.check,
    "pair": pair.check,
    "speed": speed.check,
}


def main(name: str, device: str) -> int:
    try:
        check_device(device)
    except DeviceUnavailable as error:
        print(Line(device, str(error), ok=False).as_json(), flush=True)
        return NO_DEVICE
    for line in SECTIONS[name](torch.device(device)):
        print(line.as_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
