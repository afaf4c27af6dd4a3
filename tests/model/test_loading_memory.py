"""What loading takes beside the weights, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_making.main import main as make_checkpoint

from server.kernels.large_pages import BLOCK_NBYTES

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "moe_intermediate_size": 512,
    "n_routed_experts": 96,
    "vocab_size": 2048,
}
"""Many small weights, as a large model has them: while one is packed there are two or three copies of it."""
CHILD = """
import sys
from pathlib import Path
import torch
from server.kernels.choice import choose_kernels
from server.memory import give_back, keep_one_heap
from server.model.loader import load_model

def kept(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

keep_one_heap()
kernels = choose_kernels("auto", "cpu")
before = kept("VmRSS")
network = load_model(Path(sys.argv[1]), dtype=torch.bfloat16)
weights = sum(parameter.nbytes for parameter in network.parameters())
loading = kept("VmHWM") - before
model = kernels.take(network)
packing = kept("VmHWM") - before
print(kernels.name, weights, loading, packing)
"""


@pytest.mark.full
@pytest.mark.processes
def test_there_are_never_two_copies_of_the_weights(tmp_path: Path) -> None:
    changes = [word for name, n in SIZES.items() for word in ("--set", f"{name}={n}")]
    assert (
        make_checkpoint([str(tmp_path), "--config", "flash", *changes, "--tokenizer", "none", "--draft", "none"]) == 0
    )
    child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True)
    _, weights, loading, packing = (int(word) if word.isdigit() else 0 for word in child.stdout.split())
    assert weights > 200 << 20
    assert loading < 1.1 * weights
    assert packing < 1.1 * weights + BLOCK_NBYTES
