"""Small models of many kinds, converted with both efforts: right, fused for the example, in time, and not slower.

    PYTHONPATH=. python scripts/bench_variety.py
    PYTHONPATH=. python scripts/bench_variety.py --models mixtral r3d_18 --efforts fast --device cuda

A row a conversion, each in a process of its own, with ``select="measured"``. "error": the largest relative error of the
outputs, converted / original, against float64. "gradients": the largest difference of a gradient from the original's,
relative to the largest gradient. "unserved": applied sites in programs that have not served the example. "seconds": of
the conversion, processor time of its thread, and what twenty forwards take. "ratio": converted / original, the median
over rounds in which both take turns.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

ROUNDS, SECONDS = 300, 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="names of rows; all by default")
    parser.add_argument("--efforts", nargs="+", default=["fast", "full"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(tried(options.one, options.efforts[0], options.device)))
        return
    import torch
    from bench_variety_models import MODELS

    print(f"{platform.machine()} {options.device}, {datetime.date.today().isoformat()}; torch {torch.__version__}")
    print(f"`PYTHONPATH=. python {shlex.join(['scripts/bench_variety.py', *sys.argv[1:]])}`\n")
    print("| model | effort | sites | parts | unserved | error | gradients | seconds, cpu, 20 forwards | ms | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KFCONVERT_CACHE": "off"}
    for name in options.models or MODELS:
        for effort in options.efforts:
            command = [sys.executable, __file__, "--one", name, "--efforts", effort, "--device", options.device]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            if done.returncode:
                print(f"| {name} | {effort} | failed: {done.stderr.strip().splitlines()[-1][:160]} |", flush=True)
                continue
            print(f"| {name} | {effort} | {row(json.loads(done.stdout.splitlines()[-1]))} |", flush=True)


def row(found: dict[str, Any]) -> str:
    seconds = f"{found['seconds']:.1f}, {found['processor']:.1f}, {20 * found['forward_ms'] / 1e3:.1f}"
    times = f"{found['original_ms']:.2f} -> {found['converted_ms']:.2f}"
    cells = [f"{found['applied']} of {found['found']}", found["parts"], found["unserved"]]
    cells += [f"{found['error']:.1e} / {found['original_error']:.1e}", found["gradients"], seconds, times]
    return " | ".join(map(str, [*cells, f"{found['ratio']:.2f}"]))


def tried(name: str, effort: str, device: str) -> dict[str, Any]:
    """One model converted with one effort, and what a user would find."""
    import torch
    from bench_variety_models import MODELS

    import kfconvert

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, inputs, *calls = MODELS[name]()
    model = model.eval().to(device)
    inputs = {key: moved(value, device) for key, value in inputs.items()}
    with torch.no_grad():
        forward = lambda: model(**copied(inputs))  # noqa: E731
        forward()
        took = seconds_of(forward)
        converter = kfconvert.ModelConverter(effort=effort)
        start, processor = time.perf_counter(), time.thread_time()
        options = {"example_calls": calls[0]} if calls else {}
        fused = converter.convert_model(model, example_inputs=copied(inputs), **options)
        seconds, processor = time.perf_counter() - start, time.thread_time() - processor
        stats = converter.conversion_stats
        expected = tensors(reference(model, inputs))
        error, own = (worst(tensors(each(**copied(inputs))), expected) for each in (fused, model))
    pairs = in_turns(model, fused, inputs)
    served = {path for call in stats["served"] for path in call["hits"]}
    applied = [site for site in stats["sites"] if site["status"] == "applied"]
    return {
        "applied": stats["total_replaced"],
        "found": stats["total_found"],
        "parts": len(fused.kfconvert_info()["parts"]),
        "unserved": sum((site["region"] or "") not in served for site in applied),
        "error": error,
        "original_error": own,
        "gradients": gradients(model, fused, inputs),
        "seconds": seconds,
        "processor": processor,
        "forward_ms": 1e3 * took,
        "original_ms": 1e3 * statistics.median(before for before, _ in pairs),
        "converted_ms": 1e3 * statistics.median(after for _, after in pairs),
        "ratio": statistics.median(after / before for before, after in pairs),
    }


def moved(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    return value.to(device) if hasattr(value, "to") else value


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    copy = lambda value: value.clone() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return {k: [copy(each) for each in v] if isinstance(v, list) else copy(v) for k, v in inputs.items()}


def reference(model: Any, inputs: dict[str, Any]) -> Any:
    from kfconvert.accuracy import reference_outputs

    return reference_outputs(model, (), copied(inputs)).outputs


def tensors(outputs: Any) -> list[Any]:
    """The floating-point tensors in outputs of any kind, those of key-value caches left out."""
    import torch
    from torch.utils import _pytree as pytree

    if hasattr(outputs, "to_tuple"):
        outputs = {k: v for k, v in outputs.items() if "cache" not in k and "past" not in k and k != "mems"}
    leaves = pytree.tree_leaves(outputs)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()]


def worst(found: list[Any], expected: list[Any]) -> float:
    """The largest relative error; infinite where shapes differ."""
    errors = [0.0]
    for one, other in zip(found, expected):
        if one.shape != other.shape:
            return float("inf")
        scale = other.double().abs().max().item() if other.numel() else 0.0
        errors.append((one.double() - other.double()).abs().max().item() / (scale or 1.0) if one.numel() else 0.0)
    return max(errors)


def gradients(model: Any, fused: Any, inputs: dict[str, Any]) -> str:
    """How far gradients of all parameters are from the original's, for a random cotangent."""
    import torch

    found = []
    for each in (model, fused):
        each.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        try:
            outputs = [out for out in tensors(each(**copied(inputs))) if out.requires_grad]
            if not outputs:
                return "none"
            sum((out * torch.randn_like(out)).sum() for out in outputs).backward()
        except Exception as error:
            return f"{type(error).__name__}"
        found.append([None if p.grad is None else p.grad.double() for p in each.parameters()])
    scale = max((g.abs().max().item() for g in found[0] if g is not None and g.numel()), default=0.0) or 1.0
    if [g is None for g in found[0]] != [g is None for g in found[1]]:
        return "WRONG: None"
    differences = [(a - b).abs().max().item() for a, b in zip(*found) if a is not None and a.numel()]
    return f"{max(differences, default=0.0) / scale:.0e}"


def seconds_of(call: Any) -> float:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(model: Any, fused: Any, inputs: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds of (original, converted), one pair a round."""
    import torch

    pairs, begin = [], time.perf_counter()
    with torch.inference_mode():
        for each in (model, fused, fused, fused):
            each(**copied(inputs))
        while len(pairs) < ROUNDS and (len(pairs) < 5 or time.perf_counter() - begin < SECONDS):
            given = copied(inputs), copied(inputs)
            order = (0, 1) if len(pairs) % 2 else (1, 0)
            taken = {which: seconds_of(lambda w=which: (model, fused)[w](**given[w])) for which in order}
            pairs.append((taken[0], taken[1]))
    return pairs


if __name__ == "__main__":
    main()
