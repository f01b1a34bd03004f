"""The commands on saved artifacts: ``kfconvert report`` and ``kfconvert compare``."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click


def pages(path: str) -> tuple[list[dict[str, str]], list[str]]:
    """Returns {"artifact", "page"} for each artifact in ``path``, and an error line for each artifact without a page.

    Raises:
        click.ClickException: ``path`` has no artifact.
    """
    with contextlib.redirect_stdout(sys.stderr):
        from ..artifact import ArtifactError, artifacts_in, write_report
    found, errors = [], []
    try:
        folders = artifacts_in(path)
    except ArtifactError as error:
        raise click.ClickException(str(error)) from None
    for folder in folders:
        try:
            found.append({"artifact": str(folder), "page": str(write_report(folder))})
        except ArtifactError as error:
            errors.append(str(error))
    return found, errors


def comparisons(first: str, second: str) -> dict[str, list[Any]]:
    """Returns ``comparisons`` (names and ``comparison`` for each pair of models with the same name, or the single model
    of each side) and ``only_first`` and ``only_second`` (names without a counterpart).

    Raises:
        click.ClickException: an argument cannot be read, or there is nothing to compare.
    """
    with contextlib.redirect_stdout(sys.stderr):
        from ..artifact import ArtifactError, results_in
        from ..report import comparison
    try:
        ours, theirs = results_in(first), results_in(second)
    except ArtifactError as error:
        raise click.ClickException(str(error)) from None
    if len(ours) == len(theirs) == 1:
        pairs = [(*ours, *theirs)]
    else:
        pairs = [(name, name) for name in ours if name in theirs]
    if not pairs:
        raise click.ClickException(f"no model is in both {first} and {second}")
    paired = {name for pair in pairs for name in pair}
    return {
        "comparisons": [
            {
                "first": _name(first, one, ours),
                "second": _name(second, other, theirs),
                **comparison(ours[one], theirs[other]),
            }
            for one, other in pairs
        ],
        "only_first": [name for name in ours if name not in paired],
        "only_second": [name for name in theirs if name not in paired],
    }


def _name(path: str, name: str, of: dict[str, Any]) -> str:
    return path if len(of) == 1 else f"{path}: {name}"
