"""The arithmetic of the kernels' benchmark; its times need a GPU."""

import subprocess
import sys

import pytest
import torch

from kvlab import kernel_speed
from kvlab.paths import ROOT


@pytest.mark.parametrize("start, end", [(0, 1), (0, 7), (5, 9)])
def test_operations_are_those_of_the_pairs_that_are_read(start, end):
    pairs = sum(1 for query in range(start, end) for key in range(end) if key <= query)
    assert kernel_speed.prefill_operations(start, end) == pairs * 32 * 128 * 2 * 2


def test_bytes_are_those_of_keys_and_values():
    """Llama 3.1 8B in bfloat16: 4 KiB of KV a token and layer."""
    assert kernel_speed.decode_bytes(requests=3, keys=1000) == 3 * 1000 * 4096


def test_contiguous_is_what_the_block_tables_say():
    x = torch.arange(4 * 16 * 8 * 128).view(4, 16, 8, 128)
    found = kernel_speed._contiguous(x, [[3, 1], [2, 0]], 20)
    assert found.shape == (2, 8, 20, 128)
    assert torch.equal(found[0, :, 17], x[1, 1]) and torch.equal(found[1, :, 15], x[2, 15])


_INTERPRETED = """
from kvlab import kernel_speed
kernel_speed.DEVICE = "cpu"
kernel_speed.milliseconds = lambda run: run() is None
for start, end, requests in ((0, 9, 1), (20, 29, 2), (36, 37, 2)):
    print(kernel_speed.measure(start, end, requests))
"""


def test_what_is_timed_beside_each_other_gives_the_same(monkeypatch):
    """On the CPU, without times: `measure` compares the outputs of both."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", _INTERPRETED]
    run = subprocess.run(command, cwd=ROOT / "shared", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "(True, False)\n" * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be timed")
def test_without_a_gpu_it_says_so():
    run = subprocess.run(
        [sys.executable, "-m", "kvlab.kernel_speed"], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "torch finds none" in run.stderr
