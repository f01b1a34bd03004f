"""Output on stderr during conversions: a progress bar and one-line warnings."""

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
    """Silences the log output of libraries on stderr."""
    from transformers.utils import logging as transformers_logging  # takes a second

    for library in ("huggingface_hub", "timm", "torch.export", "torch.fx", "torch.utils.cpp_extension"):
        logging.getLogger(library).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Context manager that prints each kfconvert warning as one line and drops deprecation warnings of libraries."""

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
    """Context manager that yields ``progress(stage, done, total)``, a bar on stderr. It does nothing if stderr is not a
    terminal or ``shown`` is False."""
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
