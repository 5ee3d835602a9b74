"""What Triton makes of the kernels for a Hopper GPU; no GPU is needed to find that out."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMPILED

import minikv

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="nothing compiles without triton"
)


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    variables = kept | {
        "PYTHONPATH": os.pathsep.join([str(Path(minikv.__file__).parents[1]), *sys.path[1:]]),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    program = Path(__file__).with_name("compiled.py")
    run = subprocess.run(
        [sys.executable, str(program)], env=variables, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    request.config.stash[COMPILED] = report
    return report["kernels"]


def test_all_kernels_compile_for_hopper(rows):
    assert {row["kernel"] for row in rows} == {"prefill", "decode", "merge"}
    assert {row["target"] for row in rows} == {"sm_90a"}


def test_nothing_spills(rows):
    """A tile that does not fit the registers goes to memory and back in every step of the loop."""
    assert [row for row in rows if row["spilled_bytes"]] == []


def test_the_prefill_uses_hoppers_tensor_cores(rows):
    prefills = [row for row in rows if (row["kernel"], row["dtype"]) == ("prefill", "bfloat16")]
    assert len(prefills) == 4
    assert all(row["wgmma"] for row in prefills)


def test_keys_are_fetched_while_others_are_read(rows):
    """Pipelined although their addresses come from the block table: asynchronous copies."""
    assert all(row["copies_ahead"] for row in rows if row["kernel"] != "merge")


def test_shared_memory_suffices(rows):
    assert max(row["shared_bytes"] for row in rows) <= 227 * 1024  # of a Hopper's block
