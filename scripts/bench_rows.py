"""Times delivered models against torch.compile on a GPU, row by row, with geometric means.

    PYTHONPATH=. python scripts/bench_rows.py --jobs 8 --rows "swin_t b32" "unet of SD 1.5 b2"

A row is a model with random weights and a call, see bench_rows_models.py, in a process for itself. "kfconvert" is the
converted model as a user calls it, after a first conversion without options. "torch.compile" has the mode
reduce-overhead. All variants take turns, from an idle device to an idle device. "generated" says whether kernels of
TorchInductor serve the row: "all" of them, or the "rest" around the fused modules. "accuracy" is the error against
float64 relative to the original's. With several jobs, the compilers of some rows run while another row is timed: a lock
keeps apart what is timed.
"""

import argparse
import contextlib
import copy
import datetime
import fcntl
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

# Stages of a conversion that need the host only; the others measure.
UNTIMED = ("trace", "compile")
LIMIT_S = 550


def main() -> int:
    from bench_rows_models import ROWS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="all if absent"
    )
    parser.add_argument("--jobs", type=int, default=1, help="rows at once")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of timing a row")
    parser.add_argument("--out", help="JSON file for all figures, with the seconds of each stage of a conversion")
    parser.add_argument("--profiles", metavar="DIR", help="where to write the kernels of each row")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.budget, options.profiles)))
        return 0
    print(conditions())
    columns = "eager | torch.compile | kfconvert | ratio | generated | sites | accuracy | conversion, s | peak GiB"
    print(f"\n| row | {columns} |\n|---|---:|---:|---:|---:|---|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        environment = {"KFCONVERT_CACHE": "off", "BENCH_LOCK": f"{folder}/lock", "OMP_NUM_THREADS": "2"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--budget", str(options.budget), "--one"]
        if options.profiles:
            command[2:2] = ["--profiles", options.profiles]
        found = list(pool.map(partial(row, command, os.environ | environment), options.rows))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=1)
    for batch_1, name in ((True, "batch 1"), (False, "larger batches")):
        ratios = [each["ratio"] for each in found if each and (each["batch"] == 1) == batch_1]
        if ratios:
            print(
                f"\nGeometric mean, {name}: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f} of {len(ratios)}"
            )
    below = [each["row"] for each in found if each and each["ratio"] < 1]
    print(f"\nBelow 1.0: {', '.join(below) or 'none'}; failed: {found.count(None)}")
    return int(None in found)


def conditions() -> str:
    import torch
    import transformers

    import kfconvert

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, kfconvert {kfconvert.__version__}"
    command = shlex.join(["scripts/bench_rows.py", *sys.argv[1:]])
    return f"{torch.cuda.get_device_name()}, {versions}, {datetime.date.today()}.\n`PYTHONPATH=. python {command}`"


def row(command: list[str], environment: dict[str, str], name: str) -> dict[str, Any] | None:
    """Measure a row in a process, and print its line. None if it failed."""
    try:
        done = subprocess.run([*command, name], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        lines = [str(error)] if isinstance(error, subprocess.TimeoutExpired) else done.stderr.strip().splitlines()
        print(f"| {name} | failed: {(lines or ['no output'])[-1][:200]} |", flush=True)
        return None
    times = [f"{found[key]:.3f}" for key in ("eager", "compile", "kfconvert")]
    cells = [name, *times, f"{found['ratio']:.2f}", found["generated"], found["sites"], found["accuracy"]]
    print(f"| {' | '.join(map(str, [*cells, found['seconds'], found['peak']]))} |", flush=True)
    return found


def measured(name: str, budget: float, profiles: str | None) -> dict[str, Any]:
    """One row: milliseconds per call of each variant, and what the conversion reports."""
    import torch
    from bench_rows_models import ROWS

    from kfconvert import ModelConverter
    from kfconvert.profiling import compare_timings

    warnings.simplefilter("ignore")
    made = ROWS[name]
    model, call = made.make(made.dtype)
    compiled = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            compiled(**call)
    torch.cuda.reset_peak_memory_stats()
    waited = 0.0
    with open(os.environ["BENCH_LOCK"], "w") as lock, torch.no_grad():

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal waited
            start = time.perf_counter()
            fcntl.flock(lock, fcntl.LOCK_UN if stage in UNTIMED else fcntl.LOCK_EX)
            waited += time.perf_counter() - start

        converter = ModelConverter()
        start = time.perf_counter()
        fused = converter.convert_model(model, example_inputs=call, progress=progress)
        seconds = time.perf_counter() - start - waited
        peak = torch.cuda.max_memory_allocated() / 2**30
        progress("time", 0, 1)
        variants = {"eager": model, "compile": compiled, "kfconvert": fused}
        for _ in range(4):
            fused(**call)
        timings = compare_timings({key: partial(each, **call) for key, each in variants.items()}, "cuda", budget)
        if profiles:
            write_profile(f"{profiles}/{name.replace('/', ' ')}.txt", variants, call)
    stats = converter.conversion_stats
    return {
        "row": name,
        "batch": made.batch,
        **{key: timings[key].median_ms for key in variants},
        "ratio": timings.speedup("kfconvert", "compile").ratio,
        "generated": ", ".join(each["kernels"] for each in stats["generated"]) or "-",
        "sites": stats["total_replaced"],
        "accuracy": f"{stats['accuracy']['ratio']:.2f}" if stats["accuracy"] else "-",
        "seconds": f"{seconds:.0f}",
        "stages": stats["seconds"],
        "graphs": fused.kfconvert_info()["cuda_graphs"],
        "regions": stats["regions"],
        "peak": f"{peak:.1f}",
    }


def write_profile(path: str, variants: dict[str, Any], call: dict[str, Any]) -> None:
    """Writes the kernels of one call of each variant but eager: microseconds, count, name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with open(path, "w") as file:
        for key in ("compile", "kfconvert"):
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                variants[key](**call)
                torch.cuda.synchronize()
            print(f"== {key}", file=file)
            for event in sorted(found.key_averages(), key=lambda event: -event.device_time_total)[:40]:
                print(f"{event.device_time_total:9.0f} {event.count:5d} {event.key[:150]}", file=file)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
