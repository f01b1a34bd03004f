"""What CUDA graphs cost and keep, as a user of converted models meets it: host time, random lengths and memory.

    PYTHONPATH=. python scripts/bench_delivered.py host lengths memory --dtype float16 --seq-len 128

Each part prints a markdown table. Models have random weights from a fixed seed and nothing is downloaded.

host: microseconds of one call at batch 1. "launch" is how long the host is busy until the call returns, the device
being behind: the median of turns of CALLS_A_TURN calls, not waited for; "waited" is from an idle device to an idle one.
"bare" replays a CUDA graph of the same forward, captured here, the copies of the inputs included.
lengths: calls a second of a BERT-base with texts of LENGTHS lengths in random order, with CUDA graphs and without, in
turns.
memory: MiB that PyTorch has allocated on the device: before the conversion, after it, and after calls without
recordings; and the most that a forward allocates beyond what is there before it.
"""

import argparse
import datetime
import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_models import build_case, captured
from torch import nn

from kfconvert import ModelConverter, freeze
from kfconvert.inputs import ExampleCall
from kfconvert.profiling import allocation, release

CALLS_A_TURN = 50
TURNS = 21
LENGTHS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["host", "lengths", "memory"])
    parser.add_argument("--dtype", default="float16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--memory-of", nargs="+", default=["resnet50", "bert-base", "llama-1.1b"], metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32, help="of the forwards whose memory is measured")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}; `{' '.join(sys.argv)}`")
    warnings.simplefilter("ignore")
    with torch.no_grad():
        if "host" in options.parts:
            host(options.seq_len, dtype)
        if "lengths" in options.parts:
            lengths(dtype)
        if "memory" in options.parts:
            memory(options.memory_of, options.batch, options.seq_len, dtype)
    return 0


def converted(model: nn.Module, call: ExampleCall, **options: Any) -> nn.Module:
    converter = ModelConverter(select="all", validate_accuracy=False, effort="fast", **options)
    return converter.convert_model(model, example_inputs=call.kwargs)


def host(seq_len: int, dtype: torch.dtype) -> None:
    variants = "bare", "delivered", "frozen"
    table("model", *(f"{each}, {how}" for how in ("launch", "waited") for each in variants))
    for name in ("resnet50", "bert-base"):
        case = build_case(name, 1, seq_len, torch.device("cuda"), dtype)
        call = case.call
        if not case.has_convolutions:  # all that a tokenizer returns
            ids = call.kwargs["input_ids"]
            call = ExampleCall((), {**call.kwargs, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1})
        fused = converted(case.model, call)
        delivered, bare = partial(call, fused), captured(fused, call)
        found = {"bare": both(bare), "delivered": both(delivered)}
        freeze(fused)
        found["frozen"] = both(delivered)
        launch, waited = (" | ".join(f"{found[key][index]:.0f}" for key in found) for index in (0, 1))
        print(f"| {name} | {launch} | {waited} |", flush=True)


def both(call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a call not waited for, and of one that is."""
    for _ in range(10):
        call()
    launches, waits = [], []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS_A_TURN):
            call()
        launches.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        for _ in range(CALLS_A_TURN):
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            waits.append(time.perf_counter() - start)
    return 1e6 * statistics.median(launches) / CALLS_A_TURN, 1e6 * statistics.median(waits)


def lengths(dtype: torch.dtype) -> None:
    table("batch", "calls/s, launched", "calls/s, CUDA graphs", "ratio", "recordings")
    for batch in (1, 8):
        case = build_case("bert-base", batch, 128, torch.device("cuda"), dtype)
        models = {graphs: converted(case.model, case.call, cuda_graphs=graphs) for graphs in (False, True)}
        order = random.Random(0)
        texts = [case.call.kwargs["input_ids"][:, :1].repeat(1, 8 * (1 + index)) for index in range(LENGTHS)]
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(7):
            turn = [order.choice(texts) for _ in range(4 * LENGTHS)]
            for graphs, model in models.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for text in turn:
                    model(input_ids=text)
                    torch.cuda.synchronize()
                rates[graphs].append(len(turn) / (time.perf_counter() - start))
        launched, recorded = (statistics.median(each) for each in rates.values())
        ratio = statistics.median(one / other for other, one in zip(*rates.values()))
        count = models[True].kfconvert_info()["cuda_graphs"]["recordings"]
        print(f"| {batch} | {launched:.0f} | {recorded:.0f} | {ratio:.3f} | {count} |", flush=True)


def memory(names: list[str], batch: int, seq_len: int, dtype: torch.dtype) -> None:
    peaks = (f"peak of a forward, {how}" for how in ("before", "launched", "replayed"))
    table("model", "before", "converted", "after calls", *peaks)
    for name in names:
        found = []
        for graphs in (False, True):
            release(torch.device("cuda"))
            case = build_case(name, batch, seq_len, torch.device("cuda"), dtype)
            model, call = case.model, case.call
            del case
            call(model)
            most = [peak(partial(call, model))]
            release(torch.device("cuda"))
            held = [allocated()]
            fused = converted(model, call, cuda_graphs=graphs)
            del model
            gc.collect()
            held.append(allocated())
            for _ in range(4):
                call(fused)
            held.append(allocated())
            most.append(peak(partial(call, fused)))
            found.append((held, most))
            del fused
        (held, (before, launched)), (_, (_, replayed)) = found
        figures = [*held, before, launched, replayed]
        print(f"| {name} | {' | '.join(f'{figure:.0f}' for figure in figures)} |", flush=True)


def table(*columns: str) -> None:
    """The head of a markdown table, figures to the right."""
    print(f"\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")


def allocated() -> float:
    """MiB on the device."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / 2**20


def peak(call: Callable[[], Any]) -> float:
    """The MiB that ``call`` allocates at most beyond what is there before."""
    found = allocation(call, torch.device("cuda"))
    assert found is not None  # on CUDA
    return found.peak / 2**20


if __name__ == "__main__":
    sys.exit(main())
