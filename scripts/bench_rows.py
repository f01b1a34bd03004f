"""Times delivered models against torch.compile on a GPU, row by row, with geometric means.

    PYTHONPATH=. python scripts/bench_rows.py --jobs 8 --rows "swin_t b32" "unet of SD 1.5 b2"

A row is a model with random weights and a call, see bench_rows_models.py, in a process for itself. "kfconvert" is the
converted model as a user calls it, after a first conversion without options. "torch.compile" has the mode
reduce-overhead. All variants take turns, from an idle device to an idle device. "generated" says whether kernels of
TorchInductor serve the row: "all" of them, or the "rest" around the fused modules. "accuracy" is the error against
float64 relative to the original's, where that is known. With several jobs, so many rows are prepared at once, and one
at a time measures; when all of them are ready, their times are taken one after another on an idle host. Several GPUs
share the rows, and each times one row at a time.
"""

import argparse
import contextlib
import copy
import datetime
import faulthandler
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

# Stages of a conversion that need the host only; the others measure.
UNTIMED = ("trace", "compile")
# What a process says to its parent; it waits for an answer unless it pauses.
MEASURE, PAUSE, READY = "measure", "pause", "ready"


def main() -> int:
    from bench_rows_models import ROWS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="all if absent"
    )
    parser.add_argument("--jobs", type=int, default=1, help="rows at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of the preparation of a row")
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
    found: list[dict[str, Any] | None] = []
    gpus = devices()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        environment = {"KFCONVERT_CACHE": "off", "OMP_NUM_THREADS": "2"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        # Each row has its share of the cores. A row waits forever for a pool of compile workers that was killed, which
        # happens if the host runs out of memory (pytorch/pytorch#189290); one thread compiles without a pool.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.jobs))
        command = [sys.executable, __file__, "--budget", str(options.budget), "--one"]
        if options.profiles:
            command[2:2] = ["--profiles", options.profiles]
        for start in range(0, len(options.rows), options.jobs):
            names = options.rows[start : start + options.jobs]
            prepared = threading.Barrier(len(names))
            one = partial(row, command, os.environ | environment, options.limit, prepared)
            found += pool.map(one, itertools.cycle(gpus), names)
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


class Device(NamedTuple):
    """A GPU; ``lock`` is held while a process measures."""

    index: str
    lock: threading.Lock


def devices() -> list[Device]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [Device(index, threading.Lock()) for index in visible.split(",")]


def conditions() -> str:
    import torch
    import transformers

    import kfconvert

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, kfconvert {kfconvert.__version__}"
    command = shlex.join(["scripts/bench_rows.py", *sys.argv[1:]])
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{gpus}, {versions}, {datetime.date.today()}.\n`PYTHONPATH=. python {command}`"


def row(
    command: list[str],
    environment: dict[str, str],
    limit_s: float,
    prepared: threading.Barrier,
    device: Device,
    name: str,
) -> dict[str, Any] | None:
    """Measures a row in a process, and prints its line. Returns None if it failed.

    Args:
        limit_s: seconds until the process must be ready.
        prepared: all rows of a group have been prepared.
    """
    errors = tempfile.TemporaryFile("w+")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    environment = environment | {"CUDA_VISIBLE_DEVICES": device.index}
    process = subprocess.Popen([*command, name], env=environment, text=True, start_new_session=True, **pipes)
    limit = threading.Timer(limit_s, stop, (process,))
    limit.start()
    holds = is_ready = False
    found = None
    for line in process.stdout:
        word = line.strip()
        if word == READY:
            limit.cancel()
            device.lock.release()
            prepared.wait()
            is_ready = True
        elif word == PAUSE:
            device.lock.release()
            holds = False
            continue
        elif word.startswith("{"):
            found = json.loads(word)
            continue
        elif word != MEASURE:
            continue
        device.lock.acquire()
        holds = True
        with contextlib.suppress(BrokenPipeError):  # it was killed
            process.stdin.write("\n")
            process.stdin.flush()
    limit.cancel()
    if holds:
        device.lock.release()
    if not is_ready:
        prepared.wait()
    if found is None:
        errors.seek(0)
        text = errors.read().strip() or "no message"
        print(f"{name}:\n{text}\n", file=sys.stderr, flush=True)
        print(f"| {name} | failed: {text.splitlines()[-1][:200]} |", flush=True)
        return None
    times = [f"{found[key]:.3f}" for key in ("eager", "compile", "kfconvert")]
    cells = [name, *times, f"{found['ratio']:.2f}", found["generated"], found["sites"], found["accuracy"]]
    print(f"| {' | '.join(map(str, [*cells, found['seconds'], found['peak']]))} |", flush=True)
    return found


def stop(process: subprocess.Popen) -> None:
    """Stops a row, which writes the stacks of its threads before."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGKILL)


class Turns:
    """The device, which one process at a time measures on."""

    def __init__(self) -> None:
        self.waited, self._holds = 0.0, False

    def __call__(self, stage: str, done: int = 0, total: int = 1) -> None:
        """Hold the device in stages that measure, and give it back in others."""
        if (stage not in UNTIMED) != self._holds:
            self.ask(PAUSE if self._holds else MEASURE)

    def ask(self, word: str) -> None:
        print(word, flush=True)
        self._holds = word != PAUSE
        if self._holds:
            start = time.perf_counter()
            sys.stdin.readline()
            self.waited += time.perf_counter() - start


def measured(name: str, budget: float, profiles: str | None) -> dict[str, Any]:
    """One row: milliseconds per call of each variant, and what the conversion reports."""
    import torch
    from bench_rows_models import ROWS

    from kfconvert import ModelConverter
    from kfconvert.profiling import compare_timings

    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    made = ROWS[name]
    model, call = made.make(made.dtype)
    compiled = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            compiled(**call)
    torch.cuda.reset_peak_memory_stats()
    turns = Turns()
    with torch.no_grad():
        converter = ModelConverter()
        start = time.perf_counter()
        fused = converter.convert_model(model, example_inputs=call, progress=turns)
        seconds = time.perf_counter() - start - turns.waited
        peak = torch.cuda.max_memory_allocated() / 2**30
        turns("delivered")
        variants = {"eager": model, "compile": compiled, "kfconvert": fused}
        for _ in range(4):
            fused(**call)
        turns.ask(READY)
        timings = compare_timings({key: partial(each, **call) for key, each in variants.items()}, "cuda", budget)
        if profiles:
            write_profile(f"{profiles}/{re.sub('[^a-z0-9_.-]+', '-', name.lower())}.txt", variants, call)
    stats = converter.conversion_stats
    ratio = (stats["accuracy"] or {"ratio": None})["ratio"]
    return {
        "row": name,
        "batch": made.batch,
        **{key: timings[key].median_ms for key in variants},
        "ratio": timings.speedup("kfconvert", "compile").ratio,
        "generated": ", ".join(each["kernels"] for each in stats["generated"]) or "-",
        "sites": stats["total_replaced"],
        "accuracy": "-" if ratio is None else f"{ratio:.2f}",
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
