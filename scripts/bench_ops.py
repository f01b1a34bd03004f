"""Time every operator: eager, torch.compile, Triton and Liger-Kernel where they have it, and kfconvert.

    PYTHONPATH=. python scripts/bench_ops.py --device cuda --dtype float16
    PYTHONPATH=. python scripts/bench_ops.py --device cpu --dtype float32 --only 'relu|norm' --sizes 512x1024

A markdown table is printed row by row as they are measured, then notes and a summary. A variant that fails
is "-" in the table and has a note. Liger-Kernel (liger-kernel on PyPI) takes part where it can be imported.

The columns:

* us: device time of a call, without that of launching it: the median, with the quartiles or half their
  distance. On CUDA that of 100 calls in one CUDA graph (fewer where they take more than 5 ms), over four sets
  of inputs in turn; "*" where no graph could be captured, and the time is that one by one. On the CPU the
  wall-clock time of a call. The variants of a row take turns.
* of a copy: the bytes that must move, over kfconvert's time, as a share of what a copy of 256 MiB reaches;
  above 100 % in a cache. Forward: each input read once, each output written once. Backward: the gradients of
  the outputs and the inputs that it needs read, each gradient written. Compositions have none.
* one by one us: time of a call in a loop in eager mode: that of launching it where that is more.
* error: root-mean-square against float64 on the same inputs, relative to the result's root mean square, of
  the worst output or gradient; of integers how many differ. Of dropout against the nearer of the value kept
  and the value dropped, and not of a bias, whose gradient is a sum over both.

torch.compile has its default mode and static shapes. The backward is torch.autograd.grad on a forward that
was done before; "both" is forward and backward in a row, where a forward may compute the gradient.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
from bench_ops_cases import CASES, SIZES, Case, Maker
from bench_ops_compositions import COMPOSITIONS, DECLARED
from bench_ops_table import Row, header, launched_variants, line, row_name, summary
from bench_ops_timing import Task, device_times, one_by_one, task
from torch import Tensor

from kfconvert import ops
from kfconvert.inputs.example import ExampleCall
from kfconvert.profiling import copy_bandwidth
from kfconvert.profiling.bandwidth import bytes_of_call, tensors_in

VARIANTS = ("eager", "compile", "Triton", "Liger", "kfconvert")
PASSES = ("forward", "backward", "both")
SETS = 4


class Run:
    """A run with its options. `notes` go below the table; `failed`: kfconvert failed in some row."""

    def __init__(self, options: argparse.Namespace):
        self.device = torch.device(options.device)
        self.maker = Maker(self.device, getattr(torch, options.dtype))
        self.columns = [name for name in VARIANTS if name in options.columns]
        self.budget_s = options.budget
        self.copy_gb_s = copy_bandwidth(self.device)
        self.triton = imported("kfconvert.kernels.triton") if "Triton" in self.columns else None
        self.liger = imported("liger_kernel.ops") if "Liger" in self.columns else None
        self.notes: dict[str, None] = {}
        self.failed = False

    def row(self, case: Case, size: tuple[int, int], part: str) -> Row:
        torch.manual_seed(0)
        with torch.set_grad_enabled(part != "forward"):
            sets = [case.inputs(self.maker, *size) for _ in range(SETS if self.device.type == "cuda" else 1)]
            grads = [gradients_of_outputs(case, inputs) for inputs in sets]
            errors = errors_of(case, sets[0], grads[0], part)
            moved = 0 if case.group == "composition" else bytes_moved(case, sets[0], grads[0], part)
            if "compile" in self.columns:
                torch._dynamo.reset()  # else a second shape would be compiled as a dynamic one, or not at all
            variants = self.prepared(case, sets, grads, part, row_name(case, size, part))
            if not variants:
                raise RuntimeError("there is nothing to time")
            times, uncaptured = device_times(variants, self.device, self.budget_s)
            launched = None
            if self.device.type == "cuda":
                loops = {name: variants[name] for name in launched_variants(list(variants))}
                launched = one_by_one(loops, self.device, self.budget_s) if loops else None
        share = None
        if moved and "kfconvert" in times:
            share = moved / times["kfconvert"].median_ms / 1e6 / self.copy_gb_s
        if "Liger" in times and case.note:
            self.notes[case.note] = None
        return Row(case, size, part, times, uncaptured, launched, share, errors)

    def prepared(
        self, case: Case, sets: list[tuple[Tensor, ...]], grads: list[list[Tensor]], part: str, name: str
    ) -> dict[str, list[Task]]:
        """The tasks of each variant, each done once; a variant that fails is left out, with a note."""
        variants = {}
        for variant, function in self.functions(case, part):
            try:
                tasks = []
                for inputs, grad_outputs in zip(sets, grads):
                    if variant == "Liger":  # it writes into its arguments
                        inputs, grad_outputs = [x.clone() for x in inputs], [x.clone() for x in grad_outputs]
                    tasks.append(task(function, inputs, case.gradients, grad_outputs, part))
                for one in tasks:
                    one()
                variants[variant] = tasks
            except Exception as error:  # it must not cost the others their numbers
                self.notes[f"{name}: {variant} failed: {one_line(error)}"] = None
                self.failed |= variant == "kfconvert"
        return variants

    def functions(self, case: Case, part: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The variants of a case that are asked for and that there are; Triton has the forward only."""
        for name in self.columns:
            if name == "eager":
                yield name, case.plain
            elif name == "compile":
                yield name, torch.compile(case.plain, dynamic=False)
            elif name == "Triton" and part == "forward" and hasattr(self.triton, case.operator):
                yield name, case.of(self.triton)
            elif name == "Liger" and self.liger is not None and case.liger is not None:
                yield name, case.liger(self.liger)
            elif name == "kfconvert":
                yield name, case.of(ops)


def imported(module: str) -> Any:
    """The module, or None where it is not installed or does not work here."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError):
        return None


@torch.no_grad()
def gradients_of_outputs(case: Case, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Of a loss 1, as at the start of every backward; random numbers of everything else."""
    if not case.gradients:
        return []
    return [torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in tensors_in(case.plain(*inputs))]


def bytes_moved(case: Case, inputs: tuple[Tensor, ...], grads: list[Tensor], part: str) -> int:
    results = tensors_in(task(case.plain, inputs, case.gradients, grads, part)())
    if part == "backward":
        needed = range(len(inputs)) if case.reads is None else case.reads
        inputs = (*grads, *(inputs[index] for index in needed))
    # A gradient that is that of another argument or of the output is not written again.
    given = {grad.data_ptr() for grad in grads}
    written = {y.data_ptr(): y for y in results if y.data_ptr() not in given}
    return bytes_of_call(case.plain, ExampleCall(inputs), list(written.values()))


def errors_of(case: Case, inputs: tuple[Tensor, ...], grads: list[Tensor], part: str) -> dict[str, str]:
    def results(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return tensors_in(task(function, inputs, case.gradients, grads, part)())

    wide, wide_grads = [widened(x) for x in inputs], [widened(grad) for grad in grads]
    exact = [results(function, wide, wide_grads) for function in case.exact or (case.plain,)]
    errors = {}
    for name, function in (("eager", case.plain), ("kfconvert", case.of(ops))):
        with contextlib.suppress(Exception):  # whoever times it notes the failure
            errors[name] = error_text(results(function, inputs, grads), exact, inputs[0].shape)
    return errors


def widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def error_text(results: list[Tensor], exact: list[list[Tensor]], shape: torch.Size) -> str:
    """The worst error of `results` against the nearest of `exact`; of several only for this shape."""
    worst = 0.0
    for result, *candidates in zip(results, *exact, strict=True):
        if not result.is_floating_point():
            return str((result != candidates[0]).sum().item())
        if len(candidates) > 1 and result.shape != shape:
            continue
        wide, nearest = result.double(), candidates[0]
        for candidate in candidates[1:]:
            nearest = torch.where((wide - candidate).abs() < (wide - nearest).abs(), candidate, nearest)
        worst = max(worst, ((wide - nearest).square().mean() / nearest.square().mean()).sqrt().item())
    return f"{worst:.1e}"


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--only", type=re.compile, default="", help="regular expression of the cases' names")
    parser.add_argument("--passes", type=one_of(PASSES), default=PASSES, help=",".join(PASSES))
    parser.add_argument("--sizes", type=sizes, help="ROWSxCOLUMNS,... for all (default: those of each group)")
    parser.add_argument(
        "--columns",
        type=one_of(VARIANTS),
        help=f"{','.join(VARIANTS)} (default: all of them; on the CPU eager,kfconvert)",
    )
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of timing a row, one by one apart")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as torch chooses)")
    options = parser.parse_args()
    options.columns = options.columns or (VARIANTS if on_cuda(options) else ("eager", "kfconvert"))
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def on_cuda(options: argparse.Namespace) -> bool:
    return torch.device(options.device).type == "cuda"


def one_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return text.split(",")

    return names


def sizes(text: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size) for size in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 512x1024,64x768")
    return [(int(match[1]), int(match[2])) for match in found]


def asked(options: argparse.Namespace) -> Iterator[tuple[Case, tuple[int, int], str]]:
    for case in (*CASES, *COMPOSITIONS, *DECLARED):
        if not re.search(options.only, case.name):
            continue
        if not hasattr(ops, case.operator):
            print(f"{case.name}: kfconvert.ops has no {case.operator}", file=sys.stderr)
            continue
        for size in options.sizes or (*SIZES[case.group], *case.more_sizes):
            for part in options.passes:
                if part == "forward" or (case.gradients and (part == "backward" or case.joint)):
                    yield case, size, part


def environment(run: Run, options: argparse.Namespace) -> str:
    device = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if on_cuda(options):
        device = torch.cuda.get_device_name(run.device)
    versions = f"torch {torch.__version__}"
    if run.liger is not None:
        versions += f", liger-kernel {importlib.metadata.version('liger-kernel')}"
    copy = f"a copy reaches {run.copy_gb_s:.0f} GB/s"
    command = f"`python {shlex.join(sys.argv)}`"
    return f"{device}, {options.dtype}, {versions}, {datetime.date.today()}; {copy}; {command}"


def main() -> int:
    options = parse_arguments()
    cuda = on_cuda(options)
    if cuda:
        torch.cuda.set_stream(torch.cuda.Stream(options.device))  # the default stream cannot be captured
    if "compile" in options.columns:
        torch._functorch.config.donated_buffer = False  # with it a compiled backward cannot run twice
    run = Run(options)
    print(f"{environment(run, options)}\n\n{header(run.columns, cuda)}", flush=True)
    rows = []
    for case, size, part in asked(options):
        try:
            rows.append(run.row(case, size, part))
        except Exception as error:  # too large for this device, say
            run.notes[f"{row_name(case, size, part)} failed: {one_line(error)}"] = None
            continue
        print(line(rows[-1], run.columns, cuda), flush=True)
    for text in (*run.notes, *summary(rows, cuda)):
        print(f"\n{text}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
