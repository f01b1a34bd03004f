"""Time whole training steps: the original, torch.compile, Liger and the converted model, which take turns.

    PYTHONPATH=. python scripts/bench_training.py
    PYTHONPATH=. python scripts/bench_training.py "llama 8x1024" --share 8 --variants original converted --kernels
    PYTHONPATH=. python scripts/bench_training.py --small

A step is zero_grad, the forward pass with its loss, backward, clip_grad_norm_, and a step of AdamW, which is fused on
CUDA. Each variant has its own weights, from the same random ones, and its own optimizer; all see the same inputs.
"reduce-overhead" is a mode of torch.compile. "liger" patches the original with the kernels of liger-kernel, where it
knows the model; its patches of modules of transformers are there in its own steps only. "liger+compile" compiles that
model. "converted" has ``training=True``.

"kept MiB" is what the model, its optimizer and CUDA graphs hold between steps, "peak MiB" the most that a step
allocates beyond that. The last column is the time over that of the original, round by round: its median and the 95 %
interval of that.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

import kfconvert
from kfconvert.profiling import Comparison, compare_timings, failure_line, release

VARIANTS = "original", "torch.compile", "reduce-overhead", "liger", "liger+compile", "converted"
CLASSES = {
    "products": "gemm|nvjet|cublas|xmma|cutlass",
    "attention": "flash|sdpa|attention|fmha",
    "convolutions": "conv(?!ert)|cudnn.*(fprop|dgrad|wgrad)",
    "optimizer": "multi_tensor|adam",
    "kfconvert": "kfc::",
    "generated": "triton",
    "copies": "memcpy|memset|copy",
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "pad_token_id": 0,
}


@dataclass
class Case:
    """``loss`` is what a call of a model gives; ``example`` the inputs that it is converted with."""

    title: str
    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    example: Any


def llama(batch: int, length: int, device: torch.device, small: bool) -> Case:
    sizes = TINY if small else {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "vocab_size": 32000, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2 if small else 4)
    with device:
        model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = tokens((batch, length), config.vocab_size, device)
    title = f"llama, {count(model)}, {shape(ids)}, bf16"
    return Case(title, model, lambda called: called(input_ids=ids, labels=ids, use_cache=False).loss, ids[:1, :128])


def gpt2(batch: int, length: int, device: torch.device, small: bool) -> Case:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256} if small else {}
    with device:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    ids = tokens((batch, length), model.config.vocab_size, device)
    loss = autocast(lambda called: called(input_ids=ids, labels=ids, use_cache=False).loss, device)
    return Case(f"gpt2, {count(model)}, {shape(ids)}, bf16 autocast", model, loss, ids[:1, :128])


def bert(batch: int, length: int, device: torch.device, small: bool) -> Case:
    config = transformers.BertConfig(**TINY) if small else transformers.BertConfig()
    with device:
        model = transformers.BertForMaskedLM(config)
    ids = tokens((batch, length), config.vocab_size, device)
    labels = torch.where(torch.rand(ids.shape, device=device) < 0.15, ids, -100)
    title = f"bert, masked words, {count(model)}, {shape(ids)}, bf16 autocast"
    return Case(title, model, autocast(lambda called: called(input_ids=ids, labels=labels).loss, device), ids[:1])


def vision(name: str, channels_last: bool, batch: int, size: int, device: torch.device, small: bool) -> Case:
    import torchvision

    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    with device:
        model = torchvision.models.get_model("resnet18" if small else name, weights=None)
        images = torch.randn((batch, 3, size, size))
    model, images = (each.to(memory_format=memory_format) for each in (model, images))
    labels = torch.randint(1000, images.shape[:1], device=device)
    title = f"{name}, {shape(images)}{', channels-last' if channels_last else ''}, bf16 autocast"
    loss = autocast(lambda called: nn.functional.cross_entropy(called(images), labels), device)
    return Case(title, model, loss, images[:1])


# By name: what builds a case, its batch, and its sequence length or image size.
CASES: dict[str, tuple[Callable[[int, int, torch.device, bool], Case], int, int]] = {
    "bert 32x128": (bert, 32, 128),
    "bert 8x512": (bert, 8, 512),
    "llama 8x1024": (llama, 8, 1024),
    "llama 4x2048": (llama, 4, 2048),
    "llama 1x1024": (llama, 1, 1024),
    "gpt2 8x1024": (gpt2, 8, 1024),
    "vit_b_16 64": (partial(vision, "vit_b_16", False), 64, 224),
    "resnet50 128": (partial(vision, "resnet50", True), 128, 224),
    "convnext_tiny 64": (partial(vision, "convnext_tiny", True), 64, 224),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--share", type=int, default=1, help="divide batches by this number")
    parser.add_argument("--kernels", action="store_true", help="print the time of kernels by class, of one step each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of timing a variant")
    parser.add_argument("--rounds", type=int, default=7, help="at least so many")
    parser.add_argument("--small", action="store_true", help="models and inputs that a CPU can train")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    device = torch.device(options.device)
    variants = list(dict.fromkeys(("original", *options.variants)))
    conditions = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kfconvert": kfconvert.__version__,
        "date": str(datetime.date.today()),
        "command": " ".join(sys.argv),
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print("\n| model | variant | ms (quartiles, rounds) | kept MiB | peak MiB | / original |")
    print("|---|---|---:|---:|---:|---:|")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for name in options.cases or CASES:
        torch.manual_seed(0)
        build, batch, size = CASES[name]
        batch, size = (2, 32) if options.small else (max(1, batch // options.share), size)
        rows += bench(build(batch, size, device, options.small), variants, device, options)
        torch.compiler.reset()
        release(device)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"conditions": conditions, "rows": rows}, file, indent=1)
    return 0 if any("ms" in row for row in rows) else 1


def bench(case: Case, variants: list[str], device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant, which are printed as well."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for variant in variants:
        row = rows[variant] = {"model": case.title, "variant": variant}
        release(device)
        before, start = allocated(device), time.perf_counter()
        try:
            step = prepared(case, variant, device)
            for _ in range(5):  # a training graph is recorded at the fourth
                step()
            step.optimizer.zero_grad()
            row["kept_mib"], row["peak_mib"] = allocated(device) - before, peak(step, device)
            row["prepared_s"] = time.perf_counter() - start
            steps[variant] = step
        except Exception as error:  # a variant that fails must not end the run
            row["failure"] = failure_line(error)
    times = compare_timings(steps, device, options.budget * len(steps), options.rounds)
    for variant, row in rows.items():
        if variant in steps:
            row["ms"] = dataclasses.asdict(times[variant])
            row["over_original"] = over_original(times, variant)
        print(line(row), flush=True)
        if options.kernels and variant in steps:
            row["kernels_ms"] = kernels(steps[variant])
            print(f"| | kernels, ms | {row['kernels_ms']} | | | |", flush=True)
    return list(rows.values())


def kernels(step: Callable[[], None]) -> dict[str, float]:
    """The milliseconds of one step on the device, by class of kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in found.key_averages():
        kind = next((kind for kind, names in CLASSES.items() if re.search(names, event.key, re.I)), "other")
        times[kind] += event.device_time_total / 1e3
    return {kind: round(time, 2) for kind, time in times.most_common() if time}


class Step:
    """A training step of ``model``, whose calls go to ``called``, in a context."""

    def __init__(
        self,
        model: nn.Module,
        called: Any,
        loss: Callable[[nn.Module], Tensor],
        fused: bool,
        context: AbstractContextManager[Any],
    ):
        self.model, self._called, self._loss, self._context = model, called, loss, context
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)

    @torch.enable_grad()
    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with self._context:
            self._loss(self._called).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def prepared(case: Case, variant: str, device: torch.device) -> Step:
    if variant == "converted":
        converter = kfconvert.ModelConverter(effort="fast", new_tokens=0, training=True)
        model = converter.convert_model(case.model.eval(), example_inputs=case.example, inplace=False)
    else:
        model = copy.deepcopy(case.model)
    context = patched_by_liger(model) if variant.startswith("liger") else nullcontext()
    model.train()
    called: Any = model
    if variant in ("torch.compile", "reduce-overhead", "liger+compile"):
        called = torch.compile(model, mode=variant if variant == "reduce-overhead" else None)
    return Step(model, called, case.loss, device.type == "cuda", context)


def patched_by_liger(model: nn.Module) -> AbstractContextManager[Any]:
    """Patches ``model`` with Liger's kernels, and returns a context with its patches of the module of its class."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    _apply_liger_kernel_to_instance(model)
    changed = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    vars(module).update(before)
    return mock.patch.multiple(module, **changed) if changed else nullcontext()


def over_original(times: Comparison, variant: str) -> list[float]:
    """The time of the variant over that of the original: the median of all rounds, and the bounds of that."""
    speedup = times.speedup(variant)
    return [1 / speedup.ratio, 1 / speedup.high, 1 / speedup.low]


def line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['model']} | {row['variant']} | {row['failure']} | | | |"
    ms, (ratio, low, high) = row["ms"], row["over_original"]
    measured = f"{ms['median_ms']:.2f} ({ms['q1_ms']:.2f} to {ms['q3_ms']:.2f}, {ms['rounds']})"
    memory = f"{row['kept_mib']:.0f} | {row['peak_mib']:.0f}"
    over = "" if row["variant"] == "original" else f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    return f"| {row['model']} | {row['variant']} | {measured} | {memory} | {over} |"


def tokens(size: tuple[int, int], words: int, device: torch.device) -> Tensor:
    return torch.randint(3, words, size, device=device)


def autocast(loss: Callable[[nn.Module], Tensor], device: torch.device) -> Callable[[nn.Module], Tensor]:
    def scaled(called: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss(called)

    return scaled


def count(model: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters"


def shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def allocated(device: torch.device) -> float:
    """MiB that tensors and CUDA graphs hold on the device; 0 on a CPU, where PyTorch does not count them."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    graphs = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    unused = sum(segment["total_size"] - segment["allocated_size"] for segment in graphs)
    return (torch.cuda.memory_allocated(device) + unused) / 2**20


def peak(step: Callable[[], None], device: torch.device) -> float:
    """The MiB that ``step`` allocates at most beyond what is there before."""
    if device.type != "cuda":
        step()
        return 0.0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


if __name__ == "__main__":
    sys.exit(main())
