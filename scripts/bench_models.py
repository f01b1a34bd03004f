"""Time whole models: eager, torch.compile and kfconvert, in one run and with their errors.

From the repository root, without installing anything:

    PYTHONPATH=. python scripts/bench_models.py --device cuda --dtype float16 --models resnet50 bert-base \
        --batch-sizes 1 32 --seq-len 128 --out results.json --markdown

Models have random weights from a fixed seed and nothing is downloaded; the batch norms of CNNs get the
statistics of random images, so that folding them is not a no-op. Images are standard normal numbers, token
ids are uniform, and no attention mask is given. For each model and batch size all variants are timed in turns
(see kfconvert.profiling.compare_candidates, which `kfconvert bench` uses as well), so that the ratios belong to one
state of the machine. A variant that fails becomes a row that says why.

On CUDA torch.compile runs in its mode reduce-overhead, which records CUDA graphs as kfconvert does where that
is faster. "replayed" rows replay a forward from a graph captured here, the copy of the inputs included: the time
of the device alone. "extra MiB" is by how much the memory that PyTorch has set aside on the device grew while the
variant was prepared, after its unused part was given back; "peak MiB" is the most that a call allocates beyond what is
there before it, which is its outputs where it is replayed.
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfconvert.accuracy import reference_outputs
from kfconvert.inputs import ExampleCall
from kfconvert.profiling import (
    COMPILED,
    CONVERTED,
    EAGER,
    Candidate,
    Comparison,
    compare_candidates,
    compiled,
    environment,
    failure_line,
    release,
)

LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}  # TinyLlama's
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-base": ("BertModel", "BertConfig", {}),
    "gpt2": ("GPT2Model", "GPT2Config", {}),
    "gpt2-lm": ("GPT2LMHeadModel", "GPT2Config", {"use_cache": False}),
    "llama-1.1b": ("LlamaForCausalLM", "LlamaConfig", {"use_cache": False, **LLAMA}),
}
CHANNELS_LAST = "eager channels-last"
IMAGE_SIZE = 224
SEED = 0


@dataclasses.dataclass
class Row:
    """One line of the result: a variant of one model at one batch size. Times in milliseconds."""

    model: str
    batch: int
    variant: str
    median_ms: float | None = None
    q1_ms: float | None = None
    q3_ms: float | None = None
    rounds: int | None = None
    speedup_vs_eager: dict[str, Any] | None = None
    speedup_vs_compile: dict[str, Any] | None = None
    prepare_s: float | None = None  # to the first result, compilation and conversion included
    extra_mib: float | None = None  # device memory that its preparation took
    peak_mib: float | None = None  # the most that a call allocates
    error: float | None = None  # largest error against float64, relative to the output's scale
    failure: str | None = None
    details: dict[str, Any] | None = None


@dataclasses.dataclass
class Case:
    """A model with its inputs, on the device and in the dtype of the run."""

    name: str
    model: nn.Module
    call: ExampleCall
    has_convolutions: bool


def main() -> int:
    options = parse_arguments()
    device = torch.device(options.device)
    conditions = describe_environment(device, options)
    rows: list[Row] = []
    # An empty cache: preparation takes as long as it does for somebody who compiles the model the first time.
    with tempfile.TemporaryDirectory() as empty:
        cache = options.compiler_cache or empty
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(cache, "triton")
        for name in options.models:
            for batch in options.batch_sizes:
                rows += bench(name, batch, device, options)
                release(device)
                if options.out:
                    write_json(options.out, conditions, rows)
    print(markdown(conditions, rows) if options.markdown else "\n".join(map(plain, rows)))
    return 0 if any(row.median_ms is not None for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument(
        "--models",
        nargs="+",
        default=["resnet50", "bert-base"],
        help=f"{', '.join(TRANSFORMERS)}, or any classification model of torchvision",
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as torch chooses)")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of timing a model and batch size")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="leave out all other variants but eager")
    parser.add_argument(
        "--compiler-cache",
        metavar="DIR",
        help="where torch.compile keeps what it has compiled, for another run to use; a new folder by default, so that "
        "the time of its preparation is that of a first use",
    )
    parser.add_argument("--max-autotune", action="store_true", help="also torch.compile(mode='max-autotune')")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def bench(name: str, batch: int, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """All rows of one model at one batch size."""
    note(f"{name}, batch {batch}: building the model and its float64 outputs")
    try:
        case = build_case(name, batch, options.seq_len, device, getattr(torch, options.dtype))
        reference = reference_outputs(case.model, case.call.args, case.call.kwargs)
        wanted = [
            (variant, prepare)
            for variant, prepare in variants(case, device, options)
            if not options.only or variant in (EAGER, *options.only)
        ]
        found, timings = compare_candidates(
            wanted, reference, device, options.budget, lambda stage: note(f"{name}, batch {batch}: {stage}")
        )
    except Exception as error:
        return [Row(name, batch, EAGER, failure=failure_line(error))]
    return [row_of(name, batch, candidate, timings) for candidate in found]


def row_of(name: str, batch: int, candidate: Candidate, timings: Comparison | None) -> Row:
    row = Row(name, batch, candidate.name, failure=candidate.failure, details=candidate.details)
    row.prepare_s, row.error = candidate.prepare_s, candidate.error
    row.extra_mib, row.peak_mib = (
        None if count is None else count / 2**20 for count in (candidate.extra_bytes, candidate.peak_bytes)
    )
    if timings is not None and candidate.name in timings:
        row.median_ms, row.q1_ms, row.q3_ms, row.rounds = dataclasses.astuple(timings[candidate.name])
        if candidate.name != EAGER:
            row.speedup_vs_eager = timings.speedup(candidate.name, EAGER).as_dict()
        if candidate.name != COMPILED and COMPILED in timings:
            row.speedup_vs_compile = timings.speedup(candidate.name, COMPILED).as_dict()
    return row


def variants(case: Case, device: torch.device, options: argparse.Namespace) -> Iterator[tuple[str, Callable]]:
    """The candidates of `compare_candidates`."""
    yield EAGER, lambda: (partial(case.call, case.model), None)
    if case.has_convolutions:
        yield CHANNELS_LAST, lambda: (channels_last(case), None)
    yield COMPILED, lambda: (compiled(case.model, case.call), None)
    if options.max_autotune:
        yield "torch.compile max-autotune", lambda: (compiled(case.model, case.call, "max-autotune"), None)
    converted: list[nn.Module] = []
    yield CONVERTED, lambda: convert(case, device, converted)
    if device.type == "cuda":
        yield "eager replayed", lambda: (captured(case.model, case.call), None)
        yield "kfconvert replayed", lambda: (captured(one(converted), case.call), None)


def channels_last(case: Case) -> Callable[[], Any]:
    model = copy.deepcopy(case.model).to(memory_format=torch.channels_last)
    return partial(case.call.map_tensors(lambda images: images.to(memory_format=torch.channels_last)), model)


def convert(case: Case, device: torch.device, converted: list[nn.Module]) -> tuple[Callable[[], Any], dict[str, Any]]:
    from kfconvert import ModelConverter  # here, so that the other rows do not depend on it

    converter = ModelConverter()
    model = converter.convert_model(case.model, example_inputs=case.call.kwargs, device=device)
    converted.append(model)
    return partial(case.call, model), converter.conversion_stats


def one(converted: list[nn.Module]) -> nn.Module:
    if not converted:
        raise RuntimeError("there is no converted model")
    return converted[0]


def captured(model: nn.Module, call: ExampleCall) -> Callable[[], Any]:
    """A callable that copies the inputs to fixed places and replays the forward from a CUDA graph."""
    static = call.copied()
    places = list(zip(static.tensors(), call.tensors()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries set up their workspaces outside of the capture
        for _ in range(3):
            static(model)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static(model)

    def replay() -> Any:
        for place, value in places:
            place.copy_(value)
        graph.replay()
        return out

    return replay


def build_case(name: str, batch: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Case:
    torch.manual_seed(SEED)
    if name in TRANSFORMERS:
        import transformers

        *classes, options = TRANSFORMERS[name]
        model_class, config_class = (getattr(transformers, part) for part in classes)
        model = model_class(config_class(**options)).eval().to(device, dtype)
        ids = torch.randint(model.config.vocab_size, (batch, seq_len))
        return Case(name, model, ExampleCall((), {"input_ids": ids.to(device)}), has_convolutions=False)
    import torchvision

    model = torchvision.models.get_model(name, weights=None).to(device)
    calibrate_batch_norm(model, torch.randn(8, 3, IMAGE_SIZE, IMAGE_SIZE).to(device))
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    images = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE).to(device, dtype)
    return Case(name, model.eval().to(dtype), ExampleCall((), {"x": images}), has_convolutions)


def calibrate_batch_norm(model: nn.Module, images: Tensor) -> None:
    """Set the running statistics to those of `images`."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
    with torch.no_grad():
        model.train()(images)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum


def describe_environment(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    import torchvision

    with contextlib.suppress(ImportError):
        import transformers
    known, gpu = environment(device), device.type == "cuda"
    tf32 = {"matmul": torch.backends.cuda.matmul.allow_tf32, "conv": torch.backends.cudnn.allow_tf32}
    return {
        **known,
        "device": known["device"] if gpu else f"{cpu_name()}, {known['threads']} threads",
        "dtype": options.dtype,
        "date": datetime.date.today().isoformat(),
        "command": "PYTHONPATH=. python " + shlex.join(sys.argv),
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__ if "transformers" in sys.modules else None,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "tf32": tf32 if gpu else None,
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_json(path: str, conditions: dict[str, Any], rows: list[Row]) -> None:
    with open(path, "w") as file:
        results = {"environment": conditions, "rows": [dataclasses.asdict(row) for row in rows]}
        json.dump(results, file, indent=1, default=str)


def markdown(conditions: dict[str, Any], rows: list[Row]) -> str:
    packages = ("python", "torch", "torchvision", "transformers", "kfconvert", "cudnn")
    versions = ", ".join(f"{key} {conditions[key]}" for key in packages if conditions[key])
    lines = [
        f"{conditions['device']}, {conditions['dtype']}, {conditions['date']}; {versions}.",
        f"`{conditions['command']}`",
        "",
        "| model | batch | variant | ms (quartiles) | x eager | x compile | prepare s | extra MiB | peak MiB | "
        "error vs float64 |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row.model, str(row.batch), label(row)]
        if row.median_ms is None:
            cells += [f"failed: {row.failure}", "", "", "", "", "", ""]
        else:
            cells += [
                f"{row.median_ms:.3f} ({row.q1_ms:.3f} to {row.q3_ms:.3f})",
                ratio(row.speedup_vs_eager),
                ratio(row.speedup_vs_compile),
                f"{row.prepare_s:.1f}",
                mib(row.extra_mib),
                mib(row.peak_mib),
                error_text(row),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "x: median of the ratios within each round; = marks a difference inside the noise."]
    gains = gains_over_eager(rows)
    if gains:
        mean = math.exp(sum(map(math.log, gains.values())) / len(gains))
        each = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
        lines += ["", f"Over the faster eager layout: {each}; geometric mean {mean:.2f}."]
    return "\n".join(lines)


def gains_over_eager(rows: list[Row]) -> dict[str, float]:
    """How much faster each converted model is than the original in its faster memory layout."""
    times = {(row.model, row.batch, row.variant): row.median_ms for row in rows if row.median_ms is not None}
    return {
        f"{model} b{batch}": min(times.get((model, batch, each), math.inf) for each in (EAGER, CHANNELS_LAST)) / time
        for (model, batch, variant), time in times.items()
        if variant == CONVERTED
    }


def plain(row: Row) -> str:
    start = f"{row.model} b{row.batch} {label(row)}: "
    if row.median_ms is None:
        return start + f"failed: {row.failure}"
    against = f", x {ratio(row.speedup_vs_eager)} eager" if row.speedup_vs_eager else ""
    return start + f"{row.median_ms:.3f} ms{against}, error {error_text(row)}"


def label(row: Row) -> str:
    """The variant, with the number of fused sites where it has one."""
    return f"{row.variant}, {row.details['total_replaced']} sites" if row.details else row.variant


def mib(count: float | None) -> str:
    return "" if count is None else f"{count:.0f}"


def error_text(row: Row) -> str:
    return "not known" if row.error is None else f"{row.error:.1e}"


def ratio(speedup: dict[str, Any] | None) -> str:
    if speedup is None:
        return ""
    return f"{speedup['ratio']:.2f}" + ("" if speedup["measurable"] else " =")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
