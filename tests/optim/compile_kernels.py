"""Compile the kernels for an H100 without one, and count loads of 16 bytes: run by test_fused.py."""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.optim import triton_kernel as kernel


def compiled(function, types, constants, warps=4):
    """Return the PTX of a kernel."""
    names = function.arg_names
    types = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(function, types, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


TABLES = {"table": "*i64", "grads": "*i64", "chunks": "*i64", "settings": "*fp64", "numbers": "*fp32"}
compiled(kernel.advance, {**TABLES, "tensors": "i32"}, {"PROGRAM": 64})

CASES = {
    # dtype, storage, averages: loads of 16 bytes by a thread with 8 elements in the chunk that is not masked
    (tl.float32, tl.float32, 1): 5 * 2,
    (tl.float32, tl.float32, 2): 6 * 2,
    (tl.bfloat16, tl.float32, 2): 4 + 2 * 2,
    (tl.float32, tl.bfloat16, 2): 4 * 2 + 2,
    (tl.float32, tl.int8, 2): 4 * 2,
}
PULLS = ["over", "uniform", "none"]
for (of, storage, averages), loads in CASES.items():
    for pull in PULLS if averages == 1 else PULLS[:1]:
        constants = {"OF": of, "GRAD": of, "STORAGE": storage, "AVERAGES": averages, "PULL": pull}
        constants |= {"GAP_BEFORE": pull != "none", "AVERAGE_FIRST": False, "BLOCK": 1024}
        constants |= {"ALIGNED": True, "GRAD_ALIGNED": True}
        code = compiled(kernel.step, TABLES, constants)
        found = len(re.findall(r"ld\.global\.v4\.b32", code))
        assert found == loads, (of, storage, averages, pull, found)
