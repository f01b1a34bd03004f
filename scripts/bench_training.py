"""Time whole training steps: the original, the converted model in train mode, and torch.compile, which take turns.

    PYTHONPATH=. python scripts/bench_training.py
    PYTHONPATH=. python scripts/bench_training.py llama --variants original converted eval
    PYTHONPATH=. python scripts/bench_training.py --small

A step is zero_grad, the forward pass with its loss, backward, clip_grad_norm_, and a step of AdamW, which is fused on
CUDA. Each variant has its own weights, from the same random ones, and its own optimizer; all see the same inputs.
"eval", which is left out unless it is named, is the converted model in eval mode: its backward computes the original
forward again.

"kept MiB" is what the model and its optimizer hold between steps, "peak MiB" the most that a step allocates beyond
that. The last column is the time over that of the original, round by round: its median and the 95 % interval of that.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import kfconvert
from kfconvert.profiling import Comparison, compare_timings, failure_line, release

VARIANTS = "original", "converted", "torch.compile", "eval"
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


def llama(device: torch.device, small: bool) -> Case:
    sizes = TINY if small else {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "vocab_size": 32000, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2 if small else 4)
    with device:
        model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = tokens((2, 32) if small else (4, 1024), config.vocab_size, device)
    title = f"llama, {count(model)}, {shape(ids)}, bf16"
    return Case(title, model, lambda called: called(input_ids=ids, labels=ids, use_cache=False).loss, ids[:1, :128])


def bert(device: torch.device, small: bool) -> Case:
    config = transformers.BertConfig(**TINY) if small else transformers.BertConfig()
    with device:
        model = transformers.BertForMaskedLM(config)
    ids = tokens((4, 16) if small else (32, 128), config.vocab_size, device)
    labels = torch.where(torch.rand(ids.shape, device=device) < 0.15, ids, -100)
    title = f"bert, masked words, {count(model)}, {shape(ids)}, bf16 autocast"
    return Case(title, model, autocast(lambda called: called(input_ids=ids, labels=labels).loss, device), ids[:1])


def resnet(device: torch.device, small: bool) -> Case:
    import torchvision

    with device:
        model = torchvision.models.resnet18() if small else torchvision.models.resnet50()
        images = torch.randn((4, 3, 32, 32) if small else (64, 3, 224, 224))
    model, images = (each.to(memory_format=torch.channels_last) for each in (model, images))
    labels = torch.randint(1000, images.shape[:1], device=device)
    title = f"resnet{18 if small else 50}, {shape(images)}, channels-last, bf16 autocast"
    loss = autocast(lambda called: nn.functional.cross_entropy(called(images), labels), device)
    return Case(title, model, loss, images[:1])


CASES: dict[str, Callable[[torch.device, bool], Case]] = {"llama": llama, "bert": bert, "resnet": resnet}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS[:3])
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
    for name in options.models or CASES:
        torch.manual_seed(0)
        rows += bench(CASES[name](device, options.small), variants, device, options.budget, options.rounds)
        release(device)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"conditions": conditions, "rows": rows}, file, indent=1)
    return 0 if any("ms" in row for row in rows) else 1


def bench(case: Case, variants: list[str], device: torch.device, budget: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each variant, which are printed as well."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for variant in variants:
        row = rows[variant] = {"model": case.title, "variant": variant}
        release(device)
        before, start = allocated(device), time.perf_counter()
        try:
            step = prepared(case, variant, device)
            for _ in range(3):
                step()
            step.optimizer.zero_grad()
            row["kept_mib"], row["peak_mib"] = allocated(device) - before, peak(step, device)
            row["prepared_s"] = time.perf_counter() - start
            steps[variant] = step
        except Exception as error:  # a variant that fails must not end the run
            row["failure"] = failure_line(error)
    times = compare_timings(steps, device, budget * len(steps), rounds)
    for variant, row in rows.items():
        if variant in steps:
            row["ms"] = times[variant].as_dict()
            row["over_original"] = over_original(times, variant)
        print(line(row), flush=True)
    return list(rows.values())


class Step:
    """A training step of ``model``, whose calls go to ``called``."""

    def __init__(self, model: nn.Module, called: Any, loss: Callable[[nn.Module], Tensor], fused: bool):
        self.model, self._called, self._loss = model, called, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)

    @torch.enable_grad()
    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self._called).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def prepared(case: Case, variant: str, device: torch.device) -> Step:
    if variant in ("converted", "eval"):
        converter = kfconvert.ModelConverter(effort="fast", select="measured", new_tokens=0)
        model = converter.convert_model(case.model.eval(), example_inputs=case.example, inplace=False)
    else:
        model = copy.deepcopy(case.model)
    model.train(variant != "eval")
    called = torch.compile(model) if variant == "torch.compile" else model
    return Step(model, called, case.loss, fused=device.type == "cuda")


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
    """MiB that PyTorch has allocated on the device; 0 on a CPU, where it does not count them."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) / 2**20


def peak(step: Callable[[], None], device: torch.device) -> float:
    """The MiB that ``step`` allocates at most beyond what is there before."""
    before = allocated(device)
    if device.type != "cuda":
        step()
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**20 - before


if __name__ == "__main__":
    sys.exit(main())
