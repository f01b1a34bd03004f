"""The options of the ``kfconvert`` command, and what their values may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from .. import levels

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

# Options that take several values, by each of their spellings.
_MULTIPLE = {name: name for name in ("--models", "--include", "--exclude", "--modules")} | {"-m": "--models"}
_SIZES = {"--batch-size": "--batch-size"}
DTYPES = ("float32", "float16", "bfloat16", "float64")


class Model(click.ParamType):
    """A name of a model, of which any may be right; those that are known are completed, and folders."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from .. import zoo

        known = (name for source, names in zoo.list_models().items() if source != "timm" for name in names)
        found = [CompletionItem(name) for name in known if incomplete and name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="dir")]


class _Device(click.ParamType):
    name = "device"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in ("auto", "cpu", "cuda") if name.startswith(incomplete)]

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", value):
            self.fail(f"no such device, or not supported: {value!r} (try auto, cpu, cuda or cuda:0)", param, ctx)
        return value


class _Folder(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("the name of a folder is needed", param, ctx)
        return super().convert(value, param, ctx)


class _Memory(click.ParamType):
    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|B|KiB|MiB|GiB)", value) if isinstance(value, str) else None
        if match is None:
            self.fail(f"{value!r} is neither a share such as 5% nor a size such as 64MiB", param, ctx)
        number, unit = float(match[1]), match[2]
        return number / 100 if unit == "%" else int(number * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit))


class _Load(click.ParamType):
    name = "load"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, ...], float]:
        shape, colon, weight = value.partition(":")
        if colon and not (re.fullmatch(r"\d+(\.\d+)?", weight) and float(weight) > 0):
            self.fail(f"the weight {weight!r} is no number above 0, as in 32,128:0.5", param, ctx)
        return _Shape().convert(shape, param, ctx), float(weight) if colon else 1.0


class _Shape(click.ParamType):
    name = "shape"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", value):
            self.fail(f"{value!r} is no shape; positive sizes, batch first, such as 1,3,224,224", param, ctx)
        return tuple(int(size) for size in value.split(","))


class _Sizes(click.ParamType):
    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", value):
            self.fail(f"{value!r} is no size, of 1 or more", param, ctx)
        return tuple(int(size) for size in value.split(","))


class _Generation(click.ParamType):
    name = "generation"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if not re.fullmatch(r"0*[1-9]\d*,0*[1-9]\d*", value):
            self.fail(f"{value!r} is not two numbers of tokens, of the prompt and new ones, such as 64,128", param, ctx)
        prompt, new = value.split(",")
        return int(prompt), int(new)


def _several(*names: str, metavar: str, help: str, type: click.ParamType = click.STRING) -> Callable[[Any], Any]:
    """An option of which there may be several values, each of these several with commas between."""
    return click.option(*names, multiple=True, type=type, metavar=metavar, help=help, callback=_separated)


def _choice(name: str, values: Sequence[str], default: str, help: str | None = None) -> Callable[[Any], Any]:
    """An option that has one of these values."""
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
    type=_Shape(),
    metavar="N,N,...",
    help="Sizes of the single input, batch first.  [default: inputs that suit the model]",
)
_GENERATE = click.option(
    "--generate",
    type=_Generation(),
    metavar="PROMPT,NEW",
    help="Take models that generate, and time that: tokens of the prompt, and new ones.",
)
_DEVICE = click.option(
    "--device",
    type=_Device(),
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda[:N]",
    help="Where to convert and measure.",
)
_DTYPE = _choice("--dtype", DTYPES, "float32")
_BATCH_SIZE = click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
_SEQ_LEN = click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    help="Tokens per row for text models.  [default: 128, or what the model allows]",
)
_WEIGHTS = _choice(
    "--weights",
    ("auto", "pretrained", "random"),
    "auto",
    "auto takes random weights, and says so, where no hub can be reached; pretrained fails then.",
)
_CUDA_GRAPHS = _choice(
    "--cuda-graphs",
    ("auto", "on", "off"),
    "auto",
    "On CUDA, record the forward and replay it; auto does so where it is faster.",
)
_EFFORT = _choice(
    "--effort",
    ("fast", "full"),
    "full",
    "fast measures less and prepares for calls like the example only.",
)
_INCLUDE = _several("--include", metavar="NAME...", help="Patterns to fuse, with wildcards.  [default: all]")
_EXCLUDE = _several("--exclude", metavar="NAME...", help="Patterns not to fuse, with wildcards, such as 'conv_bn*'.")
_MODULES = _several(
    "--modules",
    metavar="PATH...",
    help="Modules to fuse in, with wildcards, such as 'encoder.*', and with '!head' not.  [default: all]",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")

LEVELS = (
    _DEVICE,
    click.option(
        "--size",
        type=click.Choice(levels.SIZES),
        help="Of the inputs.  [default: full on CUDA, else small]",
    ),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        metavar="FILE",
        help="Write a bar chart of the times to FILE, a PNG.",
    ),
    JSON,
)
BENCH = (
    _DEVICE,
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Of models by name.  [default: float32; an artifact has its own]",
    ),
    _INPUT_SHAPE,
    click.option(
        "--batch-size",
        "batch_sizes",
        type=_Sizes(),
        multiple=True,
        metavar="N...",
        callback=_flattened,
        help="Each model is timed with each of these, converted for it anew unless it is an artifact.  [default: 1, or "
        "that of the artifact]",
    ),
    _SEQ_LEN,
    _WEIGHTS,
    _CUDA_GRAPHS,
    _EFFORT,
    click.option("--no-compile", is_flag=True, help="Leave torch.compile out."),
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
        "--save-path",
        type=_Folder(path_type=Path),
        metavar="DIR",
        help="Write each converted model to DIR/<model>/.",
    ),
    click.option(
        "--skip-existing", is_flag=True, help="Leave out models that have an artifact in DIR, whatever its options."
    ),
    click.option(
        "--jobs",
        "at_once",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Convert N models at a time, each in a process with its share of the CPU's threads, on CUDA one on each "
        "GPU. Times are less certain while others run.",
    ),
    _choice(
        "--engine",
        ("process", "ray"),
        "process",
        "Convert them on this machine, or each in a task of Ray, which may have several.",
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
        "Fuse what is faster on this device, or all that is accurate, untimed.",
    ),
    click.option(
        "--accuracy-threshold",
        type=click.FloatRange(min=0),
        default=1e-6,
        show_default=True,
        help="Largest relative error that always passes.",
    ),
    _CUDA_GRAPHS,
    click.option(
        "--max-extra-memory",
        type=_Memory(),
        metavar="SIZE",
        help="Most memory for what is derived from weights: 64MiB, or 5% of that of the weights.  [default: no bound]",
    ),
    _EFFORT,
    click.option(
        "--tune-for",
        type=_Load(),
        multiple=True,
        metavar="N,N,...[:WEIGHT]",
        help="Sizes of inputs to be fast for, batch first, and how often they come; several times to decide for all "
        "of them together.  [default: the example inputs]",
    ),
    _INCLUDE,
    _EXCLUDE,
    _MODULES,
    JSON,
    click.option("--json-lines", is_flag=True, help="Print a line of JSON for each model when it is ready."),
)


def options(*given: Callable[[Any], Any]) -> Callable[[_Decorated], _Decorated]:
    """A decorator that gives a command these options, in this order."""

    def decorated(function: _Decorated) -> _Decorated:
        for option in reversed(given):
            function = option(function)
        return function

    return decorated


def wanted(include: tuple[str, ...], exclude: tuple[str, ...], modules: tuple[str, ...]) -> dict[str, Any]:
    """As options of a ``ConversionConfig``."""
    return {"include": include or None, "exclude": exclude, "modules": modules or None}


def spread_values(args: list[str]) -> list[str]:
    """Repeats ``--models`` and the like before each of their values, for the parser, which knows one value an option.

    ``["--models", "a", "b,c", "--json"]`` gives ``["--models", "a", "--models", "b,c", "--json"]``.
    """
    return _spread(args, _MULTIPLE, r"[^-].*|")


def spread_sizes(args: list[str]) -> list[str]:
    """The same for the sizes of ``--batch-size``, up to what is none: ``["--batch-size", "1", "32", "resnet50"]`` gives
    ``["--batch-size", "1", "--batch-size", "32", "resnet50"]``."""
    return _spread(args, _SIZES, r"\d[\d,]*")


def _spread(args: list[str], multiple: dict[str, str], value: str) -> list[str]:
    """``multiple``: what the options of several values are called, by each spelling; ``value``: what such a value looks
    like."""
    spread: list[str] = []
    flag, bare = "", False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if name in multiple and (not equals or name.startswith("--")):
            spread += [flag] if bare else []  # no value at all: the parser is to complain
            flag, bare = multiple[name], not equals
            spread += [arg] if equals else []
        elif flag and re.fullmatch(value, arg, re.DOTALL):
            spread += [flag, arg]
            bare = False
        else:
            spread += [flag] if bare else []
            flag, bare = "", False
            spread.append(arg)
    return spread + ([flag] if bare else [])
