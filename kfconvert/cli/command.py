"""The ``kfconvert`` command: its options, its output and its exit codes. The work is in ``jobs``.

torch is imported only once there is work to do, so that ``--help`` and mistakes answer at once.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..version import __version__
from . import streams
from .messages import in_one_line, unexpected

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_ERROR = 2
UNWRAPPED = 100_000  # the width of a file or a pipe: whoever reads it wraps, or searches, whole lines
# Options that take several values, by each of their spellings.
_MULTIPLE = {name: name for name in ("--models", "--include", "--exclude", "--modules")} | {"-m": "--models"}
DTYPES = ("float32", "float16", "bfloat16", "float64")


class _Command(click.Group):
    """A group whose ``--models`` and the like take all values up to the next option: ``--models a b --json``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # What follows the name of a command is its own: ``explain --exclude linear resnet50``.
        of_command = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if of_command else spread_values(args))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                raise  # click then ends the line on which the terminal has echoed ^C
            raise click.Abort() from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; models are named with --models {args[0]}")
        return super().resolve_command(ctx, args)


class _Device(click.ParamType):
    name = "device"

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


_DEVICE = click.option(
    "--device",
    type=_Device(),
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda[:N]",
    help="Where to convert and measure.",
)
_DTYPE = click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)


def _several(*names: str, metavar: str, help: str) -> Callable[[Any], Any]:
    """An option of which there may be several values, each of these several with commas between."""
    return click.option(*names, multiple=True, metavar=metavar, help=help, callback=_separated)


def _separated(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for value in values for name in value.split(",") if name))
    if values and not names:
        raise click.UsageError(f"{param.opts[-1]} needs at least one name")
    return names


_INCLUDE = _several("--include", metavar="NAME...", help="Patterns to fuse, with wildcards.  [default: all]")
_EXCLUDE = _several("--exclude", metavar="NAME...", help="Patterns not to fuse, with wildcards, such as 'conv_bn*'.")
_MODULES = _several(
    "--modules", metavar="PATH...", help="Modules to fuse in, with wildcards, such as 'encoder.*'.  [default: all]"
)


def _wanted(include: tuple[str, ...], exclude: tuple[str, ...], modules: tuple[str, ...]) -> dict[str, Any]:
    """As options of a ``ConversionConfig``."""
    return {"include": include or None, "exclude": exclude, "modules": modules or None}


def spread_values(args: list[str]) -> list[str]:
    """Repeats ``--models`` and the like before each of their values, for the parser, which knows one value an option.

    ``["--models", "a", "b,c", "--json"]`` gives ``["--models", "a", "--models", "b,c", "--json"]``.
    """
    spread: list[str] = []
    flag, bare = "", False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if name in _MULTIPLE and (not equals or name.startswith("--")):
            spread += [flag] if bare else []  # no value at all: the parser is to complain
            flag, bare = _MULTIPLE[name], not equals
            spread += [arg] if equals else []
        elif flag and not arg.startswith("-"):
            spread += [flag, arg]
            bare = False
        else:
            spread += [flag] if bare else []
            flag, bare = "", False
            spread.append(arg)
    return spread + ([flag] if bare else [])


@click.group(cls=_Command, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_several(
    "-m",
    "--models",
    metavar="NAME...",
    help="Models to convert: torchvision, Hugging Face or timm names, a local Hugging Face folder, or "
    "package.module:function.",
)
@click.option(
    "--save-path",
    type=_Folder(path_type=Path),
    metavar="DIR",
    help="Write each converted model to DIR/<model>/.",
)
@_DEVICE
@_DTYPE
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    help="Tokens per row for text models.  [default: 128, or what the model allows]",
)
@click.option(
    "--weights",
    type=click.Choice(["auto", "pretrained", "random"]),
    default="auto",
    show_default=True,
    help="auto takes random weights, and says so, where no hub can be reached; pretrained fails then.",
)
@click.option(
    "--cuda-graphs",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="On CUDA, record the forward and replay it; auto does so where it is faster.",
)
@click.option(
    "--max-extra-memory",
    type=_Memory(),
    metavar="SIZE",
    help="Most memory for what is derived from weights: 64MiB, or 5% of that of the weights.  [default: no bound]",
)
@click.option(
    "--effort",
    type=click.Choice(["fast", "full"]),
    default="full",
    show_default=True,
    help="fast measures less and prepares for calls like the example only.",
)
@click.option(
    "--tune-for",
    type=_Load(),
    multiple=True,
    metavar="N,N,...[:WEIGHT]",
    help="Sizes of inputs to be fast for, batch first, and how often they come; several times to decide for all "
    "of them together.  [default: the example inputs]",
)
@_INCLUDE
@_EXCLUDE
@_MODULES
@click.option("--list-models", is_flag=True, help="List the names known without a network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
@click.option("--version", is_flag=True, help="Print the versions and whether compiled kernels are there.")
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    save_path: Path | None,
    device: str,
    dtype: str,
    batch_size: int,
    seq_len: int | None,
    weights: str,
    cuda_graphs: str,
    max_extra_memory: float | None,
    effort: str,
    tune_for: tuple[tuple[tuple[int, ...], float], ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    modules: tuple[str, ...],
    list_models: bool,
    as_json: bool,
    version: bool,
) -> None:
    """Fuse the operations of PyTorch models, check accuracy and speed, and save the result.

    \b
    kfconvert --models resnet50 bert-base-uncased --save-path out/
    kfconvert --models timm:resnet50 ./my-bert --dtype float16 --json
    kfconvert explain resnet50
    kfconvert doctor
    """
    if ctx.invoked_subcommand is not None:
        given = [each for each in ctx.params if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE]
        if given:
            option = next(each for each in ctx.command.params if each.name == given[0]).opts[-1]
            raise click.UsageError(f"{option} has no effect before {ctx.invoked_subcommand}: options come after it")
        return
    if version:
        click.echo(_version())
    elif list_models:
        _list_models(as_json)
    elif models:
        from .jobs import Jobs

        sizes = {"batch_size": batch_size, "seq_len": seq_len}
        options = {
            "cuda_graphs": cuda_graphs if cuda_graphs == "auto" else cuda_graphs == "on",
            "max_extra_memory": max_extra_memory,
            "effort": effort,
            **_wanted(include, exclude, modules),
        }
        jobs = Jobs(save_path, device, dtype, weights, sizes, options, tune_for)
        results = jobs.run(list(models), show=None if as_json else _show(), say_error=_say_error)
        if as_json:
            click.echo(json.dumps({"kfconvert": __version__, "models": results}, indent=2))
        ctx.exit(EXIT_ERROR if any(result["error"] for result in results) else 0)
    else:
        raise click.UsageError("nothing to convert: name models with --models, or see --help")


@command.command()
@click.argument("model")
@click.option(
    "--input-shape",
    type=_Shape(),
    metavar="N,N,...",
    help="Sizes of the single input, batch first.  [default: inputs that suit the model]",
)
@_DEVICE
@_DTYPE
@_INCLUDE
@_EXCLUDE
@_MODULES
def explain(
    model: str,
    input_shape: tuple[int, ...] | None,
    device: str,
    dtype: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    modules: tuple[str, ...],
) -> None:
    """Tell, module by module, what can be fused in MODEL, and for what not, what stands in the way and where.

    No site is timed and the weights are random, so what is shown is what fits, not what is faster on this device.
    """
    from .jobs import Jobs

    options = {"select": "all", **_wanted(include, exclude, modules)}
    _show()(Jobs(None, device, dtype, "random", {}, options).explain(model, input_shape))


@command.command()
def doctor() -> None:
    """Tell which kernels are there, which are not, and what to do about it."""
    with contextlib.redirect_stdout(sys.stderr):
        from .doctor import doctor as examine

        checks = list(examine())
    for check in checks:
        click.echo(f"{'ok  ' if check.ok else 'no  '}{check.name}: {check.detail}")
        if not check.ok:
            click.echo(f"    -> {check.advice}")


def main(args: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code: 0, or 2 with one line of error."""
    with streams.results() as results:
        code = EXIT_ERROR if results.error else _run(args)
    if results.error:
        _say_error(f"cannot write the output: {results.error.strerror or results.error}")
        code = EXIT_ERROR
    streams.quiet_end()
    return code


def _run(args: list[str] | None) -> int:
    try:
        result = command.main(args, prog_name="kfconvert", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        _say_error(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        _say_error("interrupted")
    except Exception as error:
        _say_error(unexpected(error))
    return EXIT_ERROR


def _list_models(as_json: bool) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        from .. import zoo

        listed = zoo.list_models()
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    for source, names in listed.items():
        prefix = f"{source}:" if source == "timm" else ""
        click.echo(f"{source} ({len(names)})" + ("" if names else ": not installed"))
        for name in names:
            click.echo(f"  {prefix}{name}")
    click.echo("and any other model of the Hugging Face hub, a local Hugging Face folder, or package.module:function")


def _version() -> str:
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        from .. import extension

    loaded = [
        name for name, there in (("CPU", extension.EXTENSION_LOADED), ("CUDA", extension.CUDA_KERNELS_LOADED)) if there
    ]
    kernels = f"kernels: {', '.join(loaded) or 'none'}"
    return f"kfconvert {__version__} (torch {torch.__version__}, {kernels}; see kfconvert doctor)"


def _show() -> Callable[[RenderableType], None]:
    """What prints a report on the present stdout: fitted to a terminal, in whole lines anywhere else."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(file=sys.stdout).print
    console = Console(file=sys.stdout, width=UNWRAPPED)

    def show(report: RenderableType) -> None:
        with console.capture() as captured:
            console.print(report)
        lines = captured.get().split("\n")  # tables fill their columns with spaces
        click.echo("\n".join(line.rstrip() for line in lines), file=console.file, nl=False)

    return show


def _say_error(message: str) -> None:
    with contextlib.suppress(OSError):  # there is nowhere else to say it
        click.echo(f"kfconvert: error: {in_one_line(message)}", err=True)
