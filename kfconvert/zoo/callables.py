"""Models from user code: ``package.module:function``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .common import Request, ZooError, ZooModel, first_line, seeded
from .huggingface_inputs import example_inputs


def build(name: str, request: Request) -> ZooModel:
    """Calls ``package.module:function``, which returns ``(model, example_inputs)``, or only a model if it is from
    Hugging Face or the user has inputs.

    Python searches for the module in the current folder first. The function is called without arguments, with a fixed
    global seed.

    Raises:
        ZooError: the function cannot be imported or called, or it returns something else.
    """
    made = _call(name)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ZooError(f"{name} returned {type(model).__name__}, not a model or (model, example_inputs)")
    if inputs is None and request.has_inputs:
        inputs = {}
    elif inputs is None:
        if not isinstance(model, PreTrainedModel):
            raise ZooError(
                f"{name} must return (model, example_inputs): kfconvert cannot guess inputs of {type(model).__name__},"
                " and no input shape was given"
            )
        inputs = example_inputs(model, request)
    elif request.batch_size != 1 or request.seq_len is not None:
        raise ZooError(f"{name} returns its inputs: a batch size or sequence length cannot be chosen for it")
    return ZooModel(model, inputs, {"kind": "callable", "name": name, "weights": "own"})


def rebuild(recipe: dict[str, Any]) -> nn.Module:
    """Imports and calls the function of a recipe from ``build``. Only for trusted code."""
    made = _call(recipe["name"])
    return made[0] if isinstance(made, tuple) else made


def find(name: str) -> Callable[[], Any]:
    """Imports the module of ``package.module:function``, which may register patterns, and returns the function.

    Raises:
        ZooError: the function does not exist.
    """
    module_name, _, function_name = name.partition(":")
    with _of_the_user(name):
        return getattr(importlib.import_module(module_name), function_name)


def _call(name: str) -> Any:
    function = find(name)
    with _of_the_user(name), seeded():
        return function()


@contextmanager
def _of_the_user(name: str) -> Iterator[None]:
    """Context manager for running user code, with the current folder first on the module search path."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    except (Exception, SystemExit) as error:  # user code may raise anything, or call sys.exit
        raise ZooError(f"{name} failed: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.remove(here)
