"""Compile the kernels for a Hopper GPU, without one: what Triton and ptxas say, as JSON.

A program of its own: under TRITON_INTERPRET=1, which the tests beside it set where there is no GPU,
Triton does not compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from minikv.attention import kernels

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
PAGE, KV_HEADS = 16, 2


def compiled(kernel, dtype, constants, options):
    """ptx, and ptxas's own words on it, for arguments as a launch would find them."""
    element = "*" + TYPES[dtype]
    pointers = dict(q_ptr=element, k_ptr=element, v_ptr=element, out_ptr=element)
    pointers |= dict.fromkeys(("tables", "row_starts", "key_starts", "key_ends"), "*i32")
    pointers |= dict.fromkeys(("lse_ptr", "lses_ptr", "parts_ptr"), "*fp32")
    kinds = pointers | dict(scale="fp32", table_width="i32", num_splits="i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    # torch's memory begins at multiples of 16 bytes and more, which a launch sees and makes use of.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers}
    source = ASTSource(kernel, {name: kinds[name] for name in names}, constants, aligned)
    built = triton.compile(source, target=HOPPER, options=options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(built.asm["ptx"])
        ptxas = get_ptxas(HOPPER.arch).path
        command = [ptxas, "-v", "--gpu-name=sm_90a", str(file), "-o", str(file.with_suffix(".o"))]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return built, said


def report(kernel, dtype, head_dim, group, constants, options):
    shape = dict(HEADS=KV_HEADS * group, HEAD_DIM=head_dim)
    tile = {name: value for name, value in options.items() if name.isupper()}
    rest = {name: value for name, value in options.items() if not name.isupper()}
    built, said = compiled(kernel, dtype, shape | constants | tile, rest)
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups()
    return dict(
        kernel=kernel.__name__.removeprefix("_"),
        dtype=str(dtype).removeprefix("torch."),
        head_dim=head_dim,
        group=group,
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spilled_bytes=int(stores) + int(loads),
        shared_bytes=built.metadata.shared,
        target=re.search(r"\.target (\w+)", built.asm["ptx"])[1],
        wgmma=built.asm["ptx"].count("wgmma.mma_async"),
        copies_ahead=built.asm["ptx"].count("cp.async.c"),
    )


def main():
    reports = []
    paged = dict(KV_HEADS=KV_HEADS, PAGE=PAGE, WIDEN=False)
    for head_dim in (64, 128):
        for dtype, group in ((torch.bfloat16, 1), (torch.bfloat16, 8), (torch.float32, 4)):
            prefill = kernels.prefill_options(dtype, head_dim)
            decode = kernels.decode_options(dtype, group)
            reports += [
                report(kernels._prefill, dtype, head_dim, group, paged, prefill),
                report(kernels._decode, dtype, head_dim, group, paged, decode),
            ]
        merge = dict(SPLITS=64, num_warps=4)
        reports.append(report(kernels._merge, torch.bfloat16, head_dim, 1, {}, merge))
    json.dump(dict(triton=triton.__version__, kernels=reports), sys.stdout)


if __name__ == "__main__":
    main()
