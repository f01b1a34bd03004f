"""The ``kfconvert`` command: its output and exit codes. The work is in ``jobs``.

Functions import torch when they need it, so ``--help`` and usage errors are fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import os
import sys
import webbrowser
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from ..version import __version__
from . import streams
from .messages import in_one_line, printable, unexpected
from .options import BENCH, CONVERT, EXPLAIN, JSON, MULTIPLE, Model, options, spread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .jobs import Jobs

EXIT_ERROR = 2
PIPED = 80  # columns in files and pipes


class _Convert(click.Command):
    """A command with options that take all values up to the next option: ``--models a b --json``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, MULTIPLE))


class _Bench(click.Command):
    """A command with a ``--batch-size`` that takes several sizes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, ("--batch-size",), r"\d[\d,]*"))


class _Group(click.Group):
    """A group that runs ``convert`` if no subcommand is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        of_command = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if of_command else spread(args, MULTIPLE))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            named = f"models are named with --models {args[0]}"
            meant = f"did you mean {near[0]!r}? ({named})" if near else named
            raise click.UsageError(f"no command {args[0]!r}; {meant}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@options(*CONVERT)
@click.option("--list-models", is_flag=True, help="List the names known without a network.")
@click.option("--version", is_flag=True, help="Print the versions and the compiled kernels.")
@click.pass_context
def command(ctx: click.Context, list_models: bool, version: bool, **given: Any) -> None:
    """Fuse the operations of PyTorch models, check accuracy and speed, and save the result.

    \b
    kfconvert --models resnet50 bert-base-uncased --save-path out/
    kfconvert --models timm:resnet50 ./my-bert --dtype float16 --json
    kfconvert explain resnet50
    kfconvert bench resnet50 --batch-size 1 32
    kfconvert report out/ --open
    kfconvert doctor
    """
    said = [each for each in ctx.params if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE]
    if ctx.invoked_subcommand is not None:
        if said:
            option = next(each for each in ctx.command.params if each.name == said[0]).opts[-1]
            raise click.UsageError(f"{option} has no effect before {ctx.invoked_subcommand}: options come after it")
    elif version:
        click.echo(_version())
    elif list_models:
        _list_models(given["as_json"])
    elif not said:
        click.echo(ctx.get_help())
    else:
        _convert(ctx, **given)


@command.command(cls=_Convert)
@click.argument("names", nargs=-1, type=Model(), metavar="[MODEL]...")
@options(*CONVERT)
@click.pass_context
def convert(ctx: click.Context, names: tuple[str, ...], models: tuple[str, ...], **given: Any) -> None:
    """Convert models. This is the default command."""
    _convert(ctx, models=tuple(dict.fromkeys((*names, *models))), **given)


def _convert(ctx: click.Context, *, models: tuple[str, ...], as_json: bool, json_lines: bool, **given: Any) -> None:
    if not models:
        raise click.UsageError("nothing to convert: name models with --models, or see --help")
    if given["skip_existing"] and given["save_path"] is None:
        raise click.UsageError("--skip-existing needs --save-path")
    if as_json and json_lines:
        raise click.UsageError("use either --json or --json-lines, not both")
    if given["generate"] and (given["seq_len"] is not None or given["input_shape"] is not None):
        raise click.UsageError("--generate sets the prompt length: it excludes --seq-len and --input-shape")
    if given["engine"] == "ray" and importlib.util.find_spec("ray") is None:
        raise click.UsageError("--engine ray needs Ray: pip install 'kfconvert[ray]'")
    tell = (lambda result: None) if as_json else _json_line if json_lines else _report
    results = _jobs(given).run(list(models), tell, _say_error)
    if as_json:
        _json(models=results)
    elif json_lines:
        _json_line({"kfconvert": __version__, **_counts(results)})
    elif len(results) > 1:
        from .summary import summary

        _show(summary(printable(results)))
    ctx.exit(EXIT_ERROR if any(result["error"] for result in results) else 0)


def _jobs(given: dict[str, Any]) -> Jobs:
    """The work that the options ask for. Options that ``Jobs`` does not know are those of ``ConversionConfig``."""
    from .jobs import Jobs

    sizes: dict[str, Any] = {name: given.pop(name) for name in ("batch_size", "seq_len") if name in given}
    if generate := given.pop("generate", None):
        sizes |= {"seq_len": generate[0], "generates": True}
        given["new_tokens"] = generate[1]
    own = {each.name: given.pop(each.name) for each in dataclasses.fields(Jobs) if each.name in given}
    return Jobs(**own, sizes=sizes, options={name: value for name, value in given.items() if value not in (None, ())})


@command.command()
@click.argument("model", type=Model())
@options(*EXPLAIN)
def explain(model: str, as_json: bool, **given: Any) -> None:
    """Show for each module of MODEL what can be fused, what cannot and why, and its share of the time of a forward.

    The weights are random and sites are not timed: the tree shows what can be fused, not what is faster on this device.
    """
    statistics, classes = _jobs({**given, "weights": "random", "select": "all"}).explain(model)
    if as_json:
        _json(name=model, statistics=statistics, classes=classes)
    else:
        from ..report import Explanation

        _show(Explanation(printable(statistics), printable(classes)))


@command.command(cls=_Bench)
@click.argument("names", nargs=-1, required=True, type=Model(), metavar="MODEL|ARTIFACT...")
@options(*BENCH)
@click.pass_context
def bench(
    ctx: click.Context,
    names: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    no_compile: bool,
    trust_source: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Time models in turns: eager, with torch.compile, and converted.

    torch.compile runs in its default mode, on CUDA in mode reduce-overhead. A MODEL is converted first. An
    ARTIFACT is a folder that kfconvert saved, or a folder of these, and is only loaded: --weights, --cuda-graphs and
    --effort apply to a MODEL.
    """
    from .bench import Bench

    dtype = given["dtype_name"]
    jobs = _jobs({**given, "dtype_name": dtype or "float32", "new_tokens": 0})
    found = Bench(jobs, batch_sizes, dtype, not no_compile, trust_source).run(list(dict.fromkeys(names)), _say_error)
    if as_json:
        _json(benchmarks=found)
    elif any(not result["error"] for result in found):
        from .bench_table import bench_table

        _show(bench_table(printable(found)))
    ctx.exit(EXIT_ERROR if any(result["error"] for result in found) else 0)


@command.command()
@click.argument("path", type=click.Path())
@click.option("--open", "to_open", is_flag=True, help="Show it in the browser.")
@options(JSON)
@click.pass_context
def report(ctx: click.Context, path: str, to_open: bool, as_json: bool) -> None:
    """Print the path of the HTML page of the artifact PATH, or of each artifact in the folder PATH.

    kfconvert rewrites a page that is missing, or differs from the page that this version writes.
    """
    from .artifacts import pages

    found, errors = pages(path)
    if as_json:
        _json(reports=found, errors=errors)
    for page in found:
        if not as_json:
            click.echo(printable(page["page"]))
        if to_open and not webbrowser.open(Path(page["page"]).absolute().as_uri()):
            errors.append(f"no browser could open {page['page']}")
    for error in errors:
        _say_error(error)
    ctx.exit(EXIT_ERROR if errors else 0)


@command.command()
@click.argument("first", type=click.Path(), metavar="A")
@click.argument("second", type=click.Path(), metavar="B")
@options(JSON)
def compare(first: str, second: str, as_json: bool) -> None:
    """Compare two conversions: speed, accuracy, memory, and sites with different decisions.

    A and B are artifacts, folders of artifacts, or files with the output of kfconvert --json. If there are several
    models, those with the same name are compared.
    """
    from .artifacts import comparisons

    found = comparisons(first, second)
    if as_json:
        _json(**found)
        return
    from ..report import render_comparison

    for each in found["comparisons"]:
        _show(render_comparison((printable(each["first"]), printable(each["second"])), printable(each)))
    for path, key in ((first, "only_first"), (second, "only_second")):
        if found[key]:
            click.echo(f"only in {printable(path)}: {', '.join(map(printable, found[key]))}")


@command.command()
@options(JSON)
def doctor(as_json: bool) -> None:
    """Check the installation: available kernels, missing kernels, and how to fix problems."""
    with contextlib.redirect_stdout(sys.stderr):
        from .doctor import doctor as examine

        checks = list(examine())
    if as_json:
        _json(checks=[check._asdict() for check in checks])
        return
    for check in checks:
        click.echo(f"{'ok  ' if check.ok else 'no  '}{check.name}: {check.detail}")
        if not check.ok:
            click.echo(f"    -> {check.advice}")


@command.command("list")
@options(JSON)
def list_command(as_json: bool) -> None:
    """List the names of models known without a network."""
    _list_models(as_json)


@command.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL: source <(kfconvert completion bash)"""
    found = get_completion_class(shell)
    assert found is not None  # click has one for each of these
    click.echo(found(command, {}, "kfconvert", "_KFCONVERT_COMPLETE").source())


def main(args: list[str] | None = None) -> int:
    """Runs the console script and returns the exit code: 0, or 2 after printing one line of error."""
    args = sys.argv[1:] if args is None else args
    with streams.results() as results:
        code = _run(args, results)
    if results.error:
        _say_error(f"cannot write the output: {results.error.strerror or results.error}")
        code = EXIT_ERROR
    return code


def _run(args: list[str], results: streams.Results) -> int:
    try:
        result = command.main(args, prog_name="kfconvert", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        reason = error.format_message()
    except (KeyboardInterrupt, click.Abort):
        reason = "interrupted"
    except Exception as error:
        reason = unexpected(error)
    # Failed commands print JSON as well.
    if not results.has_begun and not {"--json", "--json-lines"}.isdisjoint(args):
        _json_line({"kfconvert": __version__, "error": reason})
    _say_error(reason)
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


def _json(**found: Any) -> None:
    click.echo(json.dumps({"kfconvert": __version__, **found}, indent=2))


def _json_line(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value))
    sys.stdout.flush()  # readers see each result immediately


def _report(result: dict[str, Any]) -> None:
    if result["skipped"]:
        click.echo(f"{in_one_line(result['name'])}: skipped, {in_one_line(result['saved'])} is there\n")
    elif result["statistics"]:
        from ..report import render

        _show(render(*printable([result[key] for key in ("name", "statistics", "weights", "saved")])))


def _counts(results: list[dict[str, Any]]) -> dict[str, int]:
    what = Counter("failed" if r["error"] else "skipped" if r["skipped"] else "converted" for r in results)
    return {name: what[name] for name in ("converted", "failed", "skipped")}


def _show(report: RenderableType) -> None:
    """Prints a report on the current stdout, in the width of the terminal or of ``COLUMNS``, else in PIPED columns."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(file=sys.stdout).print(report)
        return
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else PIPED
    console = Console(file=sys.stdout, width=width)
    with console.capture() as captured:
        console.print(report)
    lines = captured.get().split("\n")  # tables have trailing spaces
    click.echo("\n".join(line.rstrip() for line in lines), file=console.file, nl=False)


def _say_error(message: str) -> None:
    with contextlib.suppress(OSError):  # there is no other stream
        click.echo(f"kfconvert: error: {in_one_line(message)}", err=True)
