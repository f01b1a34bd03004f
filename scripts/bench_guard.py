"""What a call of a converted model costs before and after its generated code, in microseconds, as a markdown table.

    PYTHONPATH=. OMP_NUM_THREADS=2 python scripts/bench_guard.py

"whole" is a guarded call in which the generated code is replaced by a constant, so it is the time of the call without
the time of the model; "frozen" is the same after kfconvert.freeze. The parts are timed one by one and add up to about
the whole; "outputs" (building the model output from the flat results) comes after the generated code, all others come
before it. Every accurate site is fused (select="all"), so that the decisions, and with them the number of watched
tensors, do not depend on timings.
Each figure is the least of several runs: other work on the machine only ever adds time.
"""

import argparse
import datetime
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torchvision
import transformers
from torch import nn

from kfconvert import ModelConverter, freeze
from kfconvert.runtime import GuardedForward, Variant, guarded_forward
from kfconvert.runtime.dispatch.recompute import needs_gradient
from kfconvert.torch_state import transformed

RUNS = 500
CALLS_A_RUN = 20


def least_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call, the least of RUNS runs, each short enough to fit between two interruptions."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(CALLS_A_RUN):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / CALLS_A_RUN


@contextmanager
def constant_code(variant: Variant, arguments: dict[str, Any]):
    """The generated code of ``variant`` returns at once what it returned for ``arguments``."""
    program = variant.program
    original = program.code
    result = program.run(variant.region.call.leaves((), arguments))
    program.code = lambda *_: result
    try:
        yield result
    finally:
        program.code = original


def measure(model: nn.Module, arguments: dict[str, Any]) -> dict[str, float]:
    guarded = guarded_forward(model)
    variant = next(v for v in guarded.variants if v.region.call.leaves((), arguments) is not None)
    with constant_code(variant, arguments) as result:
        leaves = variant.region.call.leaves((), arguments)
        parts = {
            "transforms": lambda: torch.compiler.is_compiling() or transformed(),
            "state": guarded.state.refusal,
            "call form": lambda: _taken(guarded, arguments),
            "arguments": lambda: variant.region.guard.refusal(leaves),
            "gradients": lambda: needs_gradient(_parameters(guarded), leaves),
            "freshness": lambda: variant.program.run(leaves),
            "outputs": lambda: variant.region.outputs.put_together(result, ()),
        }
        hits = guarded.hits
        times = {"whole": least_us(lambda: guarded(**arguments))}
        timed = {name: least_us(part) for name, part in parts.items()}
        freeze(model)
        times["frozen"] = least_us(lambda: guarded(**arguments))
        assert guarded.hits - hits == 2 * RUNS * CALLS_A_RUN and not guarded.misses
        return times | timed


def _taken(guarded: GuardedForward, arguments: dict[str, Any]) -> list[Any] | None:
    for variant in guarded.candidates((0, *arguments)):
        leaves = variant.region.call.leaves((), arguments)
        if leaves is not None:
            return leaves
    return None


def _parameters(guarded: GuardedForward) -> list[torch.Tensor]:
    return [store[key] for store, key in guarded.state.parameter_places if store[key] is not None]


def bert(head: bool) -> nn.Module:
    kind = transformers.BertForSequenceClassification if head else transformers.BertModel
    return kind(transformers.BertConfig())


def cases() -> list[tuple[str, nn.Module, tuple[int, ...], list[str]]]:
    """(name, model, input shape, the names of the arguments of a call)"""
    every = ["input_ids", "attention_mask", "token_type_ids"]
    return [
        ("BertModel, ids", bert(head=False), (1, 128), every[:1]),
        ("BertModel, ids+mask+types", bert(head=False), (1, 128), every),
        ("BertForSequenceClassification, ids", bert(head=True), (1, 128), every[:1]),
        ("ResNet-50", torchvision.models.resnet50(), (1, 3, 224, 224), ["x"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    only = parser.parse_args().only
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    print(
        f"{platform.machine()}, {threads} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{datetime.date.today()}; `{' '.join(sys.argv)}`\n"
    )
    printed = False
    for name, model, shape, names in cases():
        if only not in name:
            continue
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            first = torch.randn(shape) if len(shape) == 4 else torch.randint(1, 100, shape)
            values = {"attention_mask": torch.ones_like(first), "token_type_ids": torch.zeros_like(first)}
            arguments = {key: values.get(key, first) for key in names}
            converter = ModelConverter(validate_accuracy=False, select="all")
            fused = converter.convert_model(model, example_inputs=arguments)
            times = measure(fused, arguments)
        if not printed:
            print(f"| model | {' | '.join(times)} |\n|---|{'---:|' * len(times)}")
            printed = True
        print(f"| {name} | {' | '.join(f'{us:.1f}' for us in times.values())} |", flush=True)


if __name__ == "__main__":
    main()
