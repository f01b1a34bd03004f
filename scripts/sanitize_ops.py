"""Call every operator with a CUDA kernel once, forward and backward, for compute-sanitizer to watch.

    PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize_ops.py
    PYTHONPATH=. compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/sanitize_ops.py --dtypes float16

The operators and their arguments are those of bench_ops.py, without what has no further kernel of our own; the sizes
are small, and of every kind that the kernels tell apart: packs and single elements, rows of a warp, of a block, and
longer ones, few rows and many.
"""

import argparse
import sys

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
    torch.cuda.synchronize()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", type=one_of(DTYPES), default=DTYPES, help=",".join(DTYPES))
    options = parser.parse_args()
    for dtype in options.dtypes:
        print(f"{dtype}: {calls(dtype)} calls", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
