"""Choose how the CUDA kernels that take rows deal them to threads, and write the table that they are built with.

    KFCONVERT_TUNE=1 KFCONVERT_CUDA_ARCHS=9.0 python setup.py build_ext --inplace
    PYTHONPATH=. python scripts/tune_kernels.py
    python setup.py build_ext --inplace

The first build has every candidate shape (threads a row x packs of 16 bytes a thread, and whether a norm's weight and
bias are asked for before the first row, which long parts of rows have no registers for); the second command times them
on this GPU, in CUDA graphs and in turns, and rewrites kfconvert/csrc/cuda/row_shapes.h; the third build has the shapes
chosen. For each length of row, once for few rows and once for many, and apart for packs of 4 (float32) and 8 elements
(float16), that shape is taken whose times over the operators, each relative to the fastest shape's, have the least
geometric mean; few and many rows share one where that costs no operator more than 5 %. The means are printed to stderr;
--out writes the table elsewhere.
"""

import argparse
import datetime
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_ops_timing import device_times

from kfconvert import extension, ops
from kfconvert.profiling import Comparison

HEADER = Path(__file__).resolve().parents[1] / "kfconvert" / "csrc" / "cuda" / "row_shapes.h"
THREADS = (8, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
ITEMS = (1, 2, 3, 4)
# Lengths of rows in packs, and their numbers: few and many for kFewRows in csrc/cuda/rows.cuh.
PACKS = (8, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
ROWS = {True: 1024, False: 16384}
MOST_BYTES = 2**28  # of one tensor: longer rows are timed with fewer
DTYPES = {4: torch.float32, 8: torch.float16}
TOLERATED = 1.05  # every further shape is a kernel more for each dtype and activation
BUDGET_S = 0.012  # of timing a row of shapes
ALWAYS_EARLY, NEVER_EARLY = 8, 32  # elements a thread
Shape = tuple[int, int, str]  # threads, packs a thread, and "true" or "false": early


def candidates(packs: int, elements: int) -> list[Shape]:
    """Shapes that hold so many packs of so many elements, none with a thread or an item to spare for all of them."""
    return [
        (threads, items, early)
        for threads in THREADS
        for items in ITEMS
        if threads * items >= packs and (items == 1 or threads * (items - 1) < packs) and threads < 2 * max(packs, 8)
        for early in ("false", "true")
        if (elements * items < NEVER_EARLY if early == "true" else elements * items > ALWAYS_EARLY)
    ]


def all_candidates() -> list[Shape]:
    return sorted({shape for packs in PACKS for elements in DTYPES for shape in candidates(packs, elements)})


def name_of(shape: Shape) -> str:
    """The same as in rows.cuh."""
    return "{}x{} {}".format(*shape)


def operators(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[str, list]]:
    """What is timed: tasks for two sets of inputs each."""
    sets = [[torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(2)] for _ in range(2)]
    weight = torch.randn(columns, device="cuda", dtype=dtype)
    yield "rms_norm", [lambda x=x: ops.rms_norm(x, columns, weight) for x, _ in sets]
    yield "layer_norm_silu", [lambda x=x: ops.layer_norm_silu(x, columns, weight, weight) for x, _ in sets]
    yield "layer_norm_gelu", [lambda x=x: ops.layer_norm_gelu(x, columns, weight, weight) for x, _ in sets]
    yield "add_layer_norm", [lambda x=x, r=r: ops.add_layer_norm(x, r, columns, weight, weight) for x, r in sets]
    yield "softmax", [lambda x=x: ops.softmax(x) for x, _ in sets]
    targets = torch.randint(columns, (rows,), device="cuda")
    yield "cross_entropy", [lambda x=x: ops.cross_entropy(x, targets) for x, _ in sets]


def timed(shapes: list[Shape], tasks: list) -> Comparison:
    """Device times of the tasks with each shape, which is chosen where a call is captured."""

    def with_shape(shape: Shape, task):
        def call():
            os.environ["KFCONVERT_ROW_SHAPE"] = name_of(shape)
            return task()

        return call

    variants = {shape: [with_shape(shape, task) for task in tasks] for shape in shapes}
    times, uncaptured = device_times(variants, torch.device("cuda"), BUDGET_S)
    if uncaptured:
        raise SystemExit(f"no CUDA graph could hold the shapes {sorted(uncaptured)}")
    return times


def slowness(elements: int, packs: int, few: bool, log) -> dict[Shape, list[float]]:
    """How much slower than the fastest each shape is for such rows, by operator."""
    dtype, shapes = DTYPES[elements], candidates(packs, elements)
    rows = min(ROWS[few], MOST_BYTES // (16 * packs))
    slower = {shape: [] for shape in shapes}
    for _, tasks in operators(rows, elements * packs, dtype):
        times = timed(shapes, tasks)
        fastest = min(times[shape].median_ms for shape in shapes)
        for shape in shapes:
            slower[shape].append(times[shape].median_ms / fastest)
    means = {shape: statistics.geometric_mean(values) for shape, values in slower.items()}
    others = ", ".join(f"{name_of(shape)} {means[shape]:.2f}" for shape in sorted(means, key=means.get))
    print(f"{dtype} {rows} x {elements * packs}: {others}", file=log, flush=True)
    return slower


def best(slower: dict[Shape, list[float]]) -> Shape:
    return min(slower, key=lambda shape: statistics.geometric_mean(slower[shape]))


def entries(packs: int, few: dict[Shape, list[float]], many: dict[Shape, list[float]]) -> list[tuple]:
    """One shape for all such rows, or two where that costs an operator more than TOLERATED."""
    shared = best({shape: few[shape] + many[shape] for shape in few})
    pairs = [pair for slower in (few, many) for pair in zip(slower[shared], slower[best(slower)], strict=True)]
    if all(mine <= TOLERATED * others for mine, others in pairs):
        return [(packs, "false", *shared)]
    return [(packs, "true", *best(few)), (packs, "false", *best(many))]


def table(elements: int, log) -> list[str]:
    """The entries of row_shapes.h, narrow rows first, each length's few rows before all others."""
    found = []
    for packs in PACKS:
        found += entries(packs, *(slowness(elements, packs, few, log) for few in (True, False)))
    return [f"  SHAPE({', '.join(map(str, entry))})" for entry in found]


def text(tables: dict[int, list[str]]) -> str:
    device, today = torch.cuda.get_device_name(), datetime.date.today()
    parts = [
        "// Threads that share a row and packs that each of them holds, by the packs of a row. Written by",
        f"// scripts/tune_kernels.py on one {device}, torch {torch.__version__}, {today}.",
        "#pragma once",
    ]
    for elements, lines in tables.items():
        columns = "packs up to, few rows only, threads, packs a thread, early"
        parts += ["", f"// Packs of {elements} elements. SHAPE({columns})"]
        parts += [" \\\n".join([f"#define KFC_ROW_SHAPES_{elements}(SHAPE)", *lines])]
    shapes = [f"  SHAPE({threads}, {items}, {early})" for threads, items, early in all_candidates()]
    parts += ["", "// Those that were tried."]
    parts += [" \\\n".join(["#define KFC_ROW_CANDIDATES(SHAPE)", *shapes]), ""]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HEADER)
    options = parser.parse_args()
    library = Path(extension.__file__).with_name("_ops_cuda.so")
    if not torch.cuda.is_available() or not library.exists():
        raise SystemExit("tune_kernels.py: needs a GPU and the compiled CUDA library")
    if b"KFCONVERT_ROW_SHAPE" not in library.read_bytes():
        raise SystemExit("tune_kernels.py: build with KFCONVERT_TUNE=1 first, so that there are shapes to choose from")
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    with torch.no_grad():
        options.out.write_text(text({elements: table(elements, sys.stderr) for elements in DTYPES}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
