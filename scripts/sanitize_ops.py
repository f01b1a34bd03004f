"""Call every operator with a CUDA kernel once, forward and backward, for compute-sanitizer to watch.

    PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize_ops.py
    PYTHONPATH=. compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/sanitize_ops.py --dtypes float16
    PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize_ops.py --triton

The operators and their arguments are those of bench_ops.py, without what has no further kernel of our own; the sizes
are small, and of every kind that the kernels tell apart: packs and single elements, rows of a warp, of a block, and
longer ones, few rows and many. With ``--triton``, these are the calls of linear layers, norms and attention in Triton.
"""

import argparse
import sys
from functools import partial

import torch
from bench_ops import gradients_of_outputs, one_of
from bench_ops_cases import CASES, Maker
from bench_ops_compositions import COMPOSITIONS, DECLARED
from bench_ops_timing import task

from kfconvert import ops
from kfconvert.ops.declaration import OPERATORS

SIZES = ((1, 8), (33, 48), (5, 1001), (300, 96), (7, 768), (40, 2048), (3, 8192), (2, 40_000), (2200, 512))
KERNELS = [case for case in (*CASES, *COMPOSITIONS, *DECLARED) if OPERATORS[case.operator].is_compiled]
# The backward of an embedding is PyTorch's, of whose kernel racecheck reports a race.
FORWARD_ONLY = ("embedding_layer_norm",)
DTYPES = ("float32", "float16", "bfloat16", "float64")


def calls(dtype: str) -> int:
    """Makes the calls; how many."""
    made, make = 0, Maker(torch.device("cuda"), getattr(torch, dtype))
    for case in KERNELS:
        for size in SIZES:
            inputs = case.inputs(make, *size)
            grads = gradients_of_outputs(case, inputs)
            has_backward = case.gradients and case.name not in FORWARD_ONLY
            for part in ("forward", "backward") if has_backward else ("forward",):
                with torch.set_grad_enabled(part == "backward"):
                    task(case.of(ops), inputs, case.gradients, grads, part)()
                made += 1
    if dtype in ("float16", "bfloat16"):
        made += depthwise_calls(make)
    torch.cuda.synchronize()
    return made


def depthwise_calls(make: Maker) -> int:
    """Calls the kernels of depthwise convolutions: tiles that images do or do not fill. Returns how many."""
    made = 0
    for kernel, stride in ((7, 1), (5, 1), (3, 1), (3, 2), (5, 2)):
        for images, channels, height, width in ((1, 8, 7, 7), (3, 24, 9, 31), (40, 40, 14, 14), (33, 136, 30, 7)):
            x = make.normal(images, channels, height, width).to(memory_format=torch.channels_last)
            # The memory order (kernel, channels) selects these kernels.
            weight = make.normal(kernel, kernel, 1, channels).permute(3, 2, 0, 1)
            ops.conv_act(x, weight, make.normal(channels), None, stride, kernel // 2, 1, channels, "silu")
            made += 1
    return made


def triton_calls(dtype: str) -> int:
    """Calls kernels in Triton: tiles that rows, columns or depth do not fill, TMA tiles, and attention with few keys.
    Returns how many."""
    from kfconvert.kernels import triton
    from kfconvert.kernels.triton.attention import attention

    device = torch.device("cuda")
    make = partial(torch.randn, device=device, dtype=getattr(torch, dtype))
    made = 0
    for rows, cols, depth in ((1, 8, 8), (65, 130, 72), (300, 257, 1000), (4096, 1032, 136)):
        x, weight, bias = make(rows, depth), make(cols, depth), make(cols)
        for given in (x, x.t().contiguous().t()):
            triton.linear_act(given, weight, bias, activation="gelu")
        triton.layer_norm_act(x, depth, make(depth), make(depth), activation="silu")
        triton.rms_norm_act(x, depth, make(depth), residual=make(rows, depth))
        triton.act_mul(x, make(rows, depth), "silu")
        made += 5
    for batch, parts, heads, rows, keys, width in (
        (4, 2, 3, 49, 49, 32),
        (1, 3, 2, 70, 200, 20),
        (2, 1, 1, 5, 256, 64),
    ):
        q, k = make(batch, parts, heads, rows, width), make(batch, parts, heads, keys, width)
        attention(q, k, make(batch, 1, heads, keys, width), (make(1, parts, heads, rows, keys),), 0.125)
        made += 1
    torch.cuda.synchronize()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", type=one_of(DTYPES), default=DTYPES, help=",".join(DTYPES))
    parser.add_argument("--triton", action="store_true", help="call the kernels in Triton, which have no float64")
    options = parser.parse_args()
    for dtype in options.dtypes:
        if not options.triton or dtype != "float64":
            print(f"{dtype}: {(triton_calls if options.triton else calls)(dtype)} calls", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
