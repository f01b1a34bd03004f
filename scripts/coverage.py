"""What kfconvert finds in the models of scripts/coverage_models.py, on CPU: writes benchmarks/COVERAGE.md.

From the repository root, without installing anything:

    PYTHONPATH=. python scripts/coverage.py                          # all models; continues where it was stopped
    PYTHONPATH=. python scripts/coverage.py --only 'timm|llama' --out /tmp/coverage.md

Each model runs in a process of its own with a time limit, so one that crashes becomes a row. Results are kept in
--cache; a run takes from there what it has, crashed models excepted. Sites are applied wherever they are accurate
(--select all), because the table tells what can be fused, not what is faster on this machine.

The columns:

* sites: applied / found (places where a pattern fits).
* coverage: found / (found + near misses). A near miss is a linear, convolution, norm or other call by which
  patterns know their sites and that lies in none, so this is the share of such calls that a fusion covers.
* error ratio: largest error of the converted model over that of the original, both against the original in float64,
  as in conversion_stats["accuracy"]. Below an error of 1e-6 any ratio passes.
* other inputs: the same comparison, by way of the guard, for other values and for one more row in the batch.
* generate: whether greedy generate() gives the same tokens, with a cache and without; "-" for other models.
* convert s: seconds for the whole conversion, the timing of the original and the result included.
* memory: MB allocated at the peak of a forward, weights included, over the original's; in brackets what weights
  derived for the fusions (folded, packed) take. Packing pads small matrices, so small models look worse than large.
"""

import argparse
import datetime
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    options = parse_arguments()
    if options.one:
        print(json.dumps(examine(options.one, options.select)))
        return 0
    from coverage_models import entries

    wanted = [entry for entry in entries() if re.search(options.only, key_of(entry))]
    if not wanted:
        sys.exit(f"no model matches {options.only!r}")
    cache = Path(options.cache)
    known = {} if options.fresh or not cache.exists() else json.loads(cache.read_text())
    reusable = {key: row for key, row in known.items() if not row.get("crash") and row["select"] == options.select}
    missing = [key_of(entry) for entry in wanted if key_of(entry) not in reusable]
    cache.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for count, (key, row) in enumerate(pool.map(lambda key: (key, run(key, options)), missing), 1):
            known[key] = reusable[key] = row
            cache.write_text(json.dumps(known, indent=1))
            print(f"[{count}/{len(missing)}] {key}: {in_short(row)}", file=sys.stderr, flush=True)
    rows = [reusable[key_of(entry)] for entry in wanted]
    Path(options.out).write_text(markdown(rows, options))
    print(summary(rows))
    return 1 if any(row.get("crash") or wrong(row) for row in rows) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression for 'source:name'")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "COVERAGE.md"))
    parser.add_argument("--cache", default=str(ROOT / "build" / "coverage.json"), help="results of earlier runs")
    parser.add_argument("--fresh", action="store_true", help="do not use results of earlier runs")
    parser.add_argument("--select", default="all", choices=["all", "measured"])
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one model may take")
    parser.add_argument("--one", metavar="SOURCE:NAME", help="examine this model here and print its row as JSON")
    return parser.parse_args()


def key_of(entry: Any) -> str:
    return f"{entry.source}:{entry.name}"


def run(key: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one model, from a process of its own."""
    source, name = key.split(":", 1)
    row = {"source": source, "name": name, "select": options.select}
    command = [sys.executable, "-X", "faulthandler", __file__, "--one", key, "--select", options.select]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return {**row, "crash": f"took longer than {options.limit:.0f} s"}
    row["seconds_in_all"] = round(time.perf_counter() - start, 1)
    if done.returncode != 0:
        return {**row, "crash": crash_reason(done)}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def crash_reason(done: subprocess.CompletedProcess) -> str:
    """The error that ended a process, in one line; of a fatal signal also where Python was."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    fatal = next((index for index, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if fatal is None:
        return lines[-1] if lines else f"exit code {done.returncode}"
    frames = [line for line in lines[fatal:] if line.startswith("File ")]
    return "; ".join([lines[fatal], *frames[:2]])


# In the process of one model


def examine(key: str, select: str) -> dict[str, Any]:
    """Convert the model ``key`` and look at the result from all sides."""
    from coverage_models import entries

    from kfconvert import ModelConverter

    warnings.simplefilter("ignore")
    entry = next(entry for entry in entries() if key_of(entry) == key)
    model, inputs = entry.make()
    converter = ModelConverter(select=select)
    start = time.perf_counter()
    converted = converter.convert_model(model, example_inputs=inputs)
    seconds = time.perf_counter() - start
    stats = converter.conversion_stats
    found, missed = stats["total_found"], len(stats["near_misses"])
    accuracy = stats["accuracy"] or {}
    return {
        "model": stats["model"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "found": found,
        "applied": stats["total_replaced"],
        "coverage": found / (found + missed) if found + missed else None,
        "patterns": {
            name.removesuffix("_found"): count
            for name, count in stats.items()
            if name.endswith("_found") and name != "total_found" and count
        },
        "near_misses": dict(Counter(f"{m['pattern']}: {m['reason']}" for m in stats["near_misses"]).most_common(3)),
        "rejected": dict(Counter(s["reason"] for s in stats["sites"] if s["status"] != "applied").most_common(3)),
        "regions": stats["regions"],
        "ratio": accuracy.get("ratio"),
        "error": (accuracy.get("optimized_error") or {}).get("max_rel"),
        "accurate": accuracy.get("passed"),
        "other_inputs": on_other_inputs(model, converted, inputs),
        "generate": on_generate(model, converted, inputs),
        "guard": converted.kfconvert_info()["guard"],
        "seconds": seconds,
        "stages": stats["seconds"],
        "memory": memory(model, converted, inputs),
        "nothing_fused": stats["nothing_fused"],
    }


def on_other_inputs(model: Any, converted: Any, inputs: Any) -> str | None:
    """None where the converted model is as accurate for values and a batch that it was not made with, else why not.

    The largest errors over all of these inputs are compared, and over more of them where these do not pass: of few
    outputs they are a matter of chance.
    """
    from torch import Tensor, cat
    from torch.utils._pytree import tree_map_only

    from kfconvert.accuracy.comparison import Original, compare_all, split_inputs
    from kfconvert.accuracy.float64_run import model_outputs, reference_outputs

    def result(change: Any) -> Any:
        args, kwargs = split_inputs(tree_map_only(Tensor, change, inputs))
        original, optimized = (model_outputs(each, args, kwargs) for each in (model, converted))
        return Original(reference_outputs(model, args, kwargs), original).run(optimized)

    changes = [partial(Tensor.roll, shifts=shift, dims=-1) for shift in range(1, 4)]
    if isinstance(inputs, (Tensor, dict)):  # all but the detectors, whose images are a list
        changes.append(lambda tensor: cat([tensor, tensor[:1].flip(-1)]))
    results = [result(change) for change in changes]
    if compare_all(results).passed:
        return None
    more = [partial(Tensor.roll, shifts=shift, dims=-1) for shift in range(4, 20)]
    return compare_all(results + [result(change) for change in more]).reason


def on_generate(model: Any, converted: Any, inputs: Any) -> str | None:
    """ "same" or "differs" for greedy generation with and without a cache; None for models that do not generate."""
    from coverage_models import generated

    if not (hasattr(model, "can_generate") and model.can_generate()):
        return None
    for use_cache in (True, False):
        expected, actual = (generated(each, inputs, use_cache) for each in (model, converted))
        if not expected.equal(actual):
            return f"differs ({'with' if use_cache else 'without'} a cache)"
    return "same"


def memory(model: Any, converted: Any, inputs: Any) -> dict[str, float] | None:
    """Bytes at the peak of a forward of the original (weights included), of the converted model, and derived by it."""
    if not hasattr(converted, "kfconvert_refresh"):
        return None
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    original_peak, _ = allocated(model, inputs)
    converted.kfconvert_refresh()
    _, derived = allocated(converted, inputs)
    converted_peak, _ = allocated(converted, inputs)
    return {"original": weights + original_peak, "converted": weights + derived + converted_peak, "derived": derived}


def allocated(model: Any, inputs: Any) -> tuple[int, int]:
    """(most bytes that a forward holds at one time, bytes that it still holds when its outputs are gone)."""
    import torch

    args, kwargs = ((inputs,), {}) if isinstance(inputs, torch.Tensor) else (inputs, {})
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        with torch.no_grad():
            model(*args, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak, held


# The page


def wrong(row: dict[str, Any]) -> bool:
    return bool(row.get("other_inputs") or row.get("accurate") is False or (row.get("generate") or "same") != "same")


def in_short(row: dict[str, Any]) -> str:
    if row.get("crash"):
        return f"CRASH: {row['crash']}"
    trouble = f" WRONG: {row['other_inputs'] or row['generate']}" if wrong(row) else ""
    return f"{row['applied']} of {row['found']} sites in {row['seconds']:.1f} s{trouble}"


def summary(rows: list[dict[str, Any]]) -> str:
    crashed = [row["name"] for row in rows if row.get("crash")]
    wrongs = [row["name"] for row in rows if not row.get("crash") and wrong(row)]
    zero = [row["name"] for row in rows if not row.get("crash") and not row["found"]]
    parts = [f"{len(rows)} models"]
    for what, names in (("crashes", crashed), ("wrong outputs", wrongs), ("without a site", zero)):
        parts.append(f"{len(names)} {what}" + (f" ({', '.join(names)})" if names else ""))
    return ", ".join(parts) + "."


def markdown(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    lines = ["# Coverage", "", *environment(options), "", summary(rows), "", *column_notes()]
    for source in dict.fromkeys(row["source"] for row in rows):
        lines += [
            "",
            f"## {source}",
            "",
            "| model | sites | coverage | error ratio | other inputs | generate | convert s | memory MB | remarks |",
            "|---|---:|---:|---:|---|---|---:|---:|---|",
            *(table_row(row) for row in rows if row["source"] == source),
        ]
    return "\n".join(lines) + "\n"


def environment(options: argparse.Namespace) -> list[str]:
    import timm
    import torch
    import torchvision
    import transformers

    packages = ", ".join(f"{p.__name__} {p.__version__}" for p in (torch, torchvision, transformers, timm))
    machine = f"{platform.machine()} CPU, {torch.get_num_threads()} threads, float32, select={options.select}"
    return [
        f"{machine}, {datetime.date.today().isoformat()}; {packages}. Small random models.",
        f"`PYTHONPATH=. python {shlex.join(['scripts/coverage.py', *sys.argv[1:]])}`",
    ]


def column_notes() -> list[str]:
    return __doc__.split("The columns:\n\n")[1].rstrip().splitlines()


def table_row(row: dict[str, Any]) -> str:
    if row.get("crash"):
        cells = ["crash", "", "", "", "", "", "", row["crash"]]
    else:
        memory = row["memory"]
        cells = [
            f"{row['applied']} / {row['found']}",
            "-" if row["coverage"] is None else f"{row['coverage']:.0%}",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            row["other_inputs"] or "same",
            row["generate"] or "-",
            f"{row['seconds']:.1f}",
            "-" if memory is None else memory_cell(memory),
            remarks(row),
        ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in [row['name'], *cells])} |"


def memory_cell(memory: dict[str, float]) -> str:
    over = (memory["converted"] - memory["original"]) / 1e6
    return f"{over:+.1f} ({memory['derived'] / 1e6:.1f})"


def remarks(row: dict[str, Any]) -> str:
    """Why nothing is fused, or what was not captured, or what most of the other calls lack."""
    if row["nothing_fused"]:
        return row["nothing_fused"]
    lost = next((region["reason"] for region in row["regions"] if not region["captured"]), None)
    if lost:
        return f"not captured: {lost}"
    rejected = next(iter(row["rejected"]), None)
    return f"not applied: {rejected}" if rejected else ""


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "scripts"))
    sys.exit(main())
