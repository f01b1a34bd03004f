"""What a user sees on stderr while models are converted: a progress bar, and warnings as lines."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..zoo import WeightsWarning
from .messages import in_one_line


def quieten_libraries() -> None:
    """Leaves stderr to the progress bar and to what concerns the user."""
    from transformers.utils import logging as transformers_logging  # takes a second

    for library in ("huggingface_hub", "timm", "torch.export", "torch.fx", "torch.utils.cpp_extension"):
        logging.getLogger(library).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Shows kfconvert's own warnings as one loud line each and drops the deprecation chatter of libraries."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, WeightsWarning) or str(message).startswith("kfconvert:"):
            text = str(message).removeprefix("kfconvert:").strip()
            click.secho(f"kfconvert: warning: {in_one_line(text)}", fg="yellow", bold=True, err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def progress_bar(name: str, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Yields ``progress(stage, done, total)``: a bar on stderr, nothing where stderr is no terminal, or it is not to be
    ``shown``."""
    columns = (
        TextColumn("[bold]{task.fields[model]}"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", model=escape(in_one_line(name)), total=None)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield progress
