"""The options of the ``kfconvert`` command and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

# Options that take several values.
MULTIPLE = ("--models", "-m", "--include", "--exclude", "--modules")
DTYPES = ("float32", "float16", "bfloat16", "float64")


class Model(click.ParamType):
    """The name of a model. Any name is accepted; known names and folders are completed."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from .. import zoo

        known = (name for source, names in zoo.list_models().items() if source != "timm" for name in names)
        found = [CompletionItem(name) for name in known if incomplete and name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="dir")]


class _Folder(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("expected the name of a folder", param, ctx)
        return super().convert(value, param, ctx)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", text):
        raise click.BadParameter(f"no such device, or not supported: {text!r} (try auto, cpu, cuda or cuda:0)")
    return text


def _memory(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|B|KiB|MiB|GiB)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is neither a share such as 5% nor a size such as 64MiB")
    number, unit = float(match[1]), match[2]
    return number / 100 if unit == "%" else int(number * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit))


def _integers(text: str, what: str) -> tuple[int, ...]:
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", text):
        raise click.BadParameter(f"{text!r} is not {what}")
    return tuple(map(int, text.split(",")))


def _shape(text: str) -> tuple[int, ...]:
    return _integers(text, "a shape of positive sizes, batch first, such as 1,3,224,224")


def _sizes(text: str) -> tuple[int, ...]:
    return _integers(text, "a size of 1 or more")


def _load(text: str) -> tuple[tuple[int, ...], float]:
    shape, colon, weight = text.partition(":")
    if colon and not (re.fullmatch(r"\d+(\.\d+)?", weight) and float(weight) > 0):
        raise click.BadParameter(f"the weight {weight!r} is not a number above 0, as in 32,128:0.5")
    return _shape(shape), float(weight) if colon else 1.0


def _generation(text: str) -> tuple[int, ...]:
    what = "two numbers of tokens, of the prompt and new ones, such as 64,128"
    if text.count(",") != 1:
        raise click.BadParameter(f"{text!r} is not {what}")
    return _integers(text, what)


def _several(*names: str, metavar: str, help: str, type: click.ParamType = click.STRING) -> Callable[[Any], Any]:
    """Creates an option that takes several values, also separated by commas."""
    return click.option(*names, multiple=True, type=type, metavar=metavar, help=help, callback=_separated)


def _choice(name: str, values: Sequence[str], default: str, help: str | None = None) -> Callable[[Any], Any]:
    return click.option(name, type=click.Choice(values), default=default, show_default=True, help=help)


def _flattened(ctx: click.Context, param: click.Parameter, values: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(size for sizes in values for size in sizes))


def _separated(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for value in values for name in value.split(",") if name))
    if values and not names:
        raise click.UsageError(f"{param.opts[-1]} needs at least one name")
    return names


_INPUT_SHAPE = click.option(
    "--input-shape",
    type=_shape,
    metavar="N,N,...",
    help="Sizes of the single input, batch first.  [default: the model's example inputs]",
)
_GENERATE = click.option(
    "--generate",
    type=_generation,
    metavar="PROMPT,NEW",
    help="Convert models with generate() and time it: tokens of the prompt, and new tokens.",
)
_DEVICE = click.option(
    "--device",
    "device_name",
    type=_device,
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda[:N]",
    help="Device to convert and measure on.",
)
_DTYPE = click.option("--dtype", "dtype_name", type=click.Choice(DTYPES), default="float32", show_default=True)
_BATCH_SIZE = click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
_SEQ_LEN = click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    help="Tokens per row for text models.  [default: 128, or the model's maximum]",
)
_WEIGHTS = _choice(
    "--weights",
    ("auto", "pretrained", "random"),
    "auto",
    "If no hub can be reached, auto warns and uses random weights, and pretrained fails.",
)
_CUDA_GRAPHS = click.option(
    "--cuda-graphs",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
    show_default=True,
    callback=lambda ctx, param, value: value if value == "auto" else value == "on",
    help="On CUDA, record the forward and replay it; auto only if that is faster.",
)
_EFFORT = _choice(
    "--effort", ("fast", "full"), "full", "fast measures less and converts only for calls like the example."
)
_TRAINING = click.option("--training", is_flag=True, help="In train mode, compile the forward and its backward.")
_INCLUDE = _several("--include", metavar="NAME...", help="Patterns to fuse, with wildcards.  [default: all]")
_EXCLUDE = _several("--exclude", metavar="NAME...", help="Patterns not to fuse, with wildcards, such as 'conv_bn*'.")
_MODULES = _several(
    "--modules",
    metavar="PATH...",
    help="Modules to fuse in, with wildcards, such as 'encoder.*'; '!head' excludes.  [default: all]",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print only JSON on stdout.")

BENCH = (
    _DEVICE,
    click.option(
        "--dtype",
        "dtype_name",
        type=click.Choice(DTYPES),
        help="Dtype of models by name.  [default: float32; artifacts keep their dtype]",
    ),
    _INPUT_SHAPE,
    click.option(
        "--batch-size",
        "batch_sizes",
        type=_sizes,
        multiple=True,
        metavar="N...",
        callback=_flattened,
        help="Batch sizes to time. A model by name is converted for each of them.  [default: 1, or the artifact's "
        "batch size]",
    ),
    _SEQ_LEN,
    _WEIGHTS,
    _CUDA_GRAPHS,
    _EFFORT,
    click.option("--no-compile", is_flag=True, help="Do not time torch.compile."),
    click.option("--trust-source", is_flag=True, help="Run the code that an artifact names (package.module:function)."),
    JSON,
)
EXPLAIN = (_INPUT_SHAPE, _DEVICE, _DTYPE, _BATCH_SIZE, _SEQ_LEN, _INCLUDE, _EXCLUDE, _MODULES, JSON)
CONVERT = (
    _several(
        "-m",
        "--models",
        type=Model(),
        metavar="NAME...",
        help="Models to convert: torchvision, Hugging Face or timm names, a local Hugging Face folder, or "
        "package.module:function.",
    ),
    click.option(
        "--save-path", type=_Folder(path_type=Path), metavar="DIR", help="Write each converted model to DIR/<model>/."
    ),
    click.option(
        "--skip-existing", is_flag=True, help="Skip models that have an artifact in DIR, even with other options."
    ),
    click.option(
        "--jobs",
        "at_once",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Convert N models in parallel, each in a process with its share of the CPU threads; on CUDA one per GPU. "
        "Parallel conversions make timings less precise.",
    ),
    _choice(
        "--engine",
        ("process", "ray"),
        "process",
        "Convert on this machine, or each model in a Ray task, on any machine of the cluster.",
    ),
    _DEVICE,
    _DTYPE,
    _INPUT_SHAPE,
    _BATCH_SIZE,
    _SEQ_LEN,
    _GENERATE,
    _WEIGHTS,
    _choice(
        "--select",
        ("measured", "all"),
        "measured",
        "Fuse accurate sites that are not slower on this device, or all accurate sites without timing.",
    ),
    click.option(
        "--accuracy-threshold",
        type=click.FloatRange(min=0),
        default=1e-6,
        show_default=True,
        help="Relative error below which a site always passes.",
    ),
    _CUDA_GRAPHS,
    click.option(
        "--max-extra-memory",
        type=_memory,
        metavar="SIZE",
        help="Memory limit for tensors derived from weights: 64MiB, or 5% of the weights.  [default: no limit]",
    ),
    _EFFORT,
    click.option(
        "--tune-for",
        type=_load,
        multiple=True,
        metavar="N,N,...[:WEIGHT]",
        help="Input sizes to tune for, batch first, with an optional weight. Repeat the option to decide for several "
        "sizes together.  [default: the example inputs]",
    ),
    _TRAINING,
    _INCLUDE,
    _EXCLUDE,
    _MODULES,
    JSON,
    click.option("--json-lines", is_flag=True, help="Print a line of JSON for each model when it is ready."),
)


def options(*given: Callable[[Any], Any]) -> Callable[[_Decorated], _Decorated]:
    """Returns a decorator that adds these options to a command, in this order."""

    def decorated(function: _Decorated) -> _Decorated:
        for option in reversed(given):
            function = option(function)
        return function

    return decorated


def spread(args: list[str], multiple: Collection[str], value: str = "[^-].*|") -> list[str]:
    """Repeats options before each of their values, because click parses one value per option.

    ``["--models", "a", "b,c", "--json"]`` gives ``["--models", "a", "--models", "b,c", "--json"]``.

    Args:
        multiple: the options that take several values.
        value: regular expression of a value.
    """
    found: list[str] = []
    flag = ""
    for position, arg in enumerate(args):
        if flag and re.fullmatch(value, arg, re.DOTALL):
            found += [arg] if args[position - 1] == flag else [flag, arg]
            continue
        name = arg.partition("=")[0]
        flag = name if name in multiple else ""
        found.append(arg)
    return found
