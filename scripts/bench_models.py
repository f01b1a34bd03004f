"""Time whole models: eager, torch.compile, kfconvert, and torch.compile of the converted model, in one run and with
their errors.

From the repository root, without installing anything:

    PYTHONPATH=. python scripts/bench_models.py --device cuda --dtype float16 --models resnet50 bert-base \
        --batch-sizes 1 32 --seq-len 128 --out results.json --markdown

Models have random weights from a fixed seed and nothing is downloaded; the batch norms of CNNs get the
statistics of random images, so that folding them is not a no-op. Images are standard normal numbers, token
ids are uniform, and no attention mask is given. For each model and batch size all variants are timed in turns
(see kfconvert.profiling), so that the ratios belong to one state of the machine; a turn is some calls, each from
an idle device to an idle device, as of somebody who calls one model over and over. A variant that fails becomes a
row that says why.

On CUDA torch.compile runs in its mode reduce-overhead, which records CUDA graphs as kfconvert does where that
is faster. "replayed" rows replay a forward from a graph captured here, the copy of the inputs included: the time
of the device alone. "extra MiB" is by how much the memory that PyTorch has set aside on the device grew while the
variant was prepared, after its unused part was given back.
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import gc
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kfconvert.accuracy import comparison
from kfconvert.accuracy.float64_run import reference_outputs
from kfconvert.profiling import compare_timings

EAGER = "eager"
COMPILED = "torch.compile"
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
IMAGE_SIZE = 224
CALLS_IN_A_ROW = 5
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
    error: float | None = None  # largest error against float64, relative to the output's scale
    failure: str | None = None
    details: dict[str, Any] | None = None


@dataclasses.dataclass
class Case:
    """A model with its inputs, on the device and in the dtype of the run."""

    name: str
    model: nn.Module
    inputs: dict[str, Tensor]
    is_cnn: bool


def main() -> int:
    options = parse_arguments()
    device = torch.device(options.device)
    environment = describe_environment(device, options)
    rows: list[Row] = []
    # An empty cache: preparation takes as long as it does for somebody who compiles the model the first time.
    with tempfile.TemporaryDirectory() as empty:
        cache = options.compiler_cache or empty
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(cache, "triton")
        for name in options.models:
            for batch in options.batch_sizes:
                rows += bench(name, batch, device, options)
                if options.out:
                    write_json(options.out, environment, rows)
    print(markdown(environment, rows) if options.markdown else "\n".join(map(plain, rows)))
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
        reference = reference_outputs(case.model, (), case.inputs)
        reference = dataclasses.replace(reference, outputs=tensors_only(reference.outputs))
    except Exception as error:
        return [Row(name, batch, EAGER, failure=one_line(error))]
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Any]] = {}
    eager_out = None
    for variant, prepare in variants(case, device, options):
        if options.only and variant not in (EAGER, *options.only):
            continue
        row = rows[variant] = Row(name, batch, variant)
        try:
            note(f"{name}, batch {batch}: preparing {variant}")
            with torch.no_grad():
                before = reserved_mib(device)
                start = time.perf_counter()
                call, row.details = prepare()
                out = call()
                synchronize(device)
                row.prepare_s = time.perf_counter() - start
                out = tensors_only(out)
                row.extra_mib = reserved_mib(device) - before
            if eager_out is None:
                eager_out = out
            checked = comparison.compare(reference, eager_out, out)
            if checked.optimized_error is None:
                raise RuntimeError(f"wrong outputs: {checked.reason}")
            row.error = checked.optimized_error.max_rel
            calls[variant] = call
        except Exception as error:  # a compiler that gives up on one model must not cost the other rows
            row.failure = one_line(error)
            note(f"{name}, batch {batch}: {variant} failed: {row.failure}")
    if EAGER in calls:
        note(f"{name}, batch {batch}: timing {len(calls)} variants in turns")
        try:
            add_timings(rows, calls, device, options.budget)
        except Exception as error:
            rows[EAGER].failure = f"timing failed: {one_line(error)}"
    calls.clear()
    release(device)
    return list(rows.values())


def add_timings(
    rows: dict[str, Row], calls: dict[str, Callable[[], Any]], device: torch.device, budget_s: float
) -> None:
    timings = compare_timings({name: in_a_row(call, device) for name, call in calls.items()}, device, budget_s)
    for variant, timing in timings.items():
        row = rows[variant]
        *times, row.rounds = dataclasses.astuple(timing)
        row.median_ms, row.q1_ms, row.q3_ms = (time / CALLS_IN_A_ROW for time in times)
        if variant != EAGER:
            row.speedup_vs_eager = timings.speedup(variant, EAGER).as_dict()
        if variant != COMPILED and COMPILED in timings:
            row.speedup_vs_compile = timings.speedup(variant, COMPILED).as_dict()


def in_a_row(call: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(CALLS_IN_A_ROW):
            call()
            synchronize(device)

    return turn


def variants(case: Case, device: torch.device, options: argparse.Namespace) -> Iterator[tuple[str, Callable]]:
    """(name, prepare) pairs; `prepare()` gives the callable to time and details for the report."""
    yield EAGER, lambda: (forward(case.model, case.inputs), None)
    if case.is_cnn and device.type == "cuda":
        yield "eager channels-last", lambda: channels_last(case)
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    yield COMPILED, lambda: compiled(case.model, case.inputs, mode)
    if options.max_autotune:
        yield "torch.compile max-autotune", lambda: compiled(case.model, case.inputs, "max-autotune")
    converted: list[nn.Module] = []
    yield "kfconvert", lambda: convert(case, device, converted)
    yield "torch.compile(fused)", lambda: compiled(one(converted), case.inputs, mode)
    if device.type == "cuda":
        yield "eager replayed", lambda: (captured(case.model, case.inputs), None)
        yield "kfconvert replayed", lambda: (captured(one(converted), case.inputs), None)


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: model(**inputs)


def channels_last(case: Case) -> tuple[Callable[[], Any], None]:
    model = copy.deepcopy(case.model).to(memory_format=torch.channels_last)
    inputs = {key: value.to(memory_format=torch.channels_last) for key, value in case.inputs.items()}
    return forward(model, inputs), None


def compiled(model: nn.Module, inputs: dict[str, Tensor], mode: str) -> tuple[Callable[[], Any], None]:
    call = forward(torch.compile(model, mode=mode), inputs)
    call()  # the second call records CUDA graphs
    return call, None


def convert(case: Case, device: torch.device, converted: list[nn.Module]) -> tuple[Callable[[], Any], dict[str, Any]]:
    from kfconvert import ModelConverter  # here, so that the other rows do not depend on it

    converter = ModelConverter(validate_accuracy=True)
    model = converter.convert_model(case.model, example_inputs=case.inputs, device=device)
    converted.append(model)
    return forward(model, case.inputs), converter.conversion_stats


def one(converted: list[nn.Module]) -> nn.Module:
    if not converted:
        raise RuntimeError("there is no converted model")
    return converted[0]


def captured(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    """A callable that copies the inputs to fixed places and replays the forward from a CUDA graph."""
    static = {key: value.clone() for key, value in inputs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries set up their workspaces outside of the capture
        for _ in range(3):
            model(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(**static)

    def replay() -> Any:
        for key, value in inputs.items():
            static[key].copy_(value)
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
        return Case(name, model, {"input_ids": ids.to(device)}, is_cnn=False)
    import torchvision

    model = torchvision.models.get_model(name, weights=None).to(device)
    calibrate_batch_norm(model, torch.randn(8, 3, IMAGE_SIZE, IMAGE_SIZE).to(device))
    is_cnn = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    images = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE).to(device, dtype)
    return Case(name, model.eval().to(dtype), {"x": images}, is_cnn)


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


def tensors_only(out: Any) -> Any:
    """The outputs without key-value caches, copied: graphs reuse the memory of their outputs."""
    if isinstance(out, Tensor):
        return out.clone()
    return {key: value.clone() for key, value in out.items() if isinstance(value, Tensor)}


def describe_environment(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    import torchvision

    with contextlib.suppress(ImportError):
        import transformers
    kfconvert = sys.modules["kfconvert"]
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"{cpu_name()}, {torch.get_num_threads()} threads"
    tf32 = {"matmul": torch.backends.cuda.matmul.allow_tf32, "conv": torch.backends.cudnn.allow_tf32}
    return {
        "device": name,
        "dtype": options.dtype,
        "date": datetime.date.today().isoformat(),
        "command": "PYTHONPATH=. python " + shlex.join(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__ if "transformers" in sys.modules else None,
        "kfconvert": getattr(kfconvert, "__version__", None),
        "extension": getattr(kfconvert, "EXTENSION_LOADED", None),
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "tf32": tf32 if gpu else None,
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_json(path: str, environment: dict[str, Any], rows: list[Row]) -> None:
    with open(path, "w") as file:
        results = {"environment": environment, "rows": [dataclasses.asdict(row) for row in rows]}
        json.dump(results, file, indent=1, default=str)


def markdown(environment: dict[str, Any], rows: list[Row]) -> str:
    packages = ("python", "torch", "torchvision", "transformers", "kfconvert", "cudnn")
    versions = ", ".join(f"{key} {environment[key]}" for key in packages if environment[key])
    lines = [
        f"{environment['device']}, {environment['dtype']}, {environment['date']}; {versions}.",
        f"`{environment['command']}`",
        "",
        "| model | batch | variant | ms (quartiles) | x eager | x compile | prepare s | extra MiB | error vs float64 |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row.model, str(row.batch), label(row)]
        if row.median_ms is None:
            cells += [f"failed: {row.failure}", "", "", "", "", ""]
        else:
            cells += [
                f"{row.median_ms:.3f} ({row.q1_ms:.3f} to {row.q3_ms:.3f})",
                ratio(row.speedup_vs_eager),
                ratio(row.speedup_vs_compile),
                f"{row.prepare_s:.1f}",
                f"{row.extra_mib:.0f}",
                f"{row.error:.1e}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "x: median of the ratios within each round; = marks a difference inside the noise."]
    return "\n".join(lines)


def plain(row: Row) -> str:
    start = f"{row.model} b{row.batch} {label(row)}: "
    if row.median_ms is None:
        return start + f"failed: {row.failure}"
    against = f", x {ratio(row.speedup_vs_eager)} eager" if row.speedup_vs_eager else ""
    return start + f"{row.median_ms:.3f} ms{against}, error {row.error:.1e}"


def label(row: Row) -> str:
    """The variant, with the number of fused sites where it has one."""
    return f"{row.variant}, {row.details['total_replaced']} sites" if row.details else row.variant


def ratio(speedup: dict[str, Any] | None) -> str:
    if speedup is None:
        return ""
    return f"{speedup['ratio']:.2f}" + ("" if speedup["measurable"] else " =")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reserved_mib(device: torch.device) -> float:
    """What is set aside on the device once it is idle; 0 on the CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / 2**20


def release(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
