"""Pipelines: objects that run modules. A recorded run has the calls for which their modules are converted."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .conversion import ConversionError, first_line
from .inputs import call_of, copy_of, is_encoder_decoder, to_each
from .json_values import json_ready
from .process import ThisThread, method_over, quiet_thread, same_generators
from .report import fragment, report_text

# How deep attributes of attributes are searched for the names of modules.
_DEPTH = 5
# How many calls of different kinds are kept of each module.
_MOST_KINDS = 8
# By module and kind of call: the number of these calls, and example inputs.
_Calls = dict[nn.Module, dict[str, tuple[float, Any]]]


class PipelineStats(dict[str, Any]):
    """The statistics of a converted pipeline, which print as one report.

    Keys: ``pipeline`` (its class), ``modules`` (statistics of each converted module by its path), ``served`` (by path:
    the ``hits`` of its programs, and its ``misses`` by reason, in a run of the converted pipeline), ``not_converted``
    (the reason for each other module that it calls, by path).
    """

    def __str__(self) -> str:
        lines = [f"{self['pipeline']}: {len(self['modules'])} modules converted"]
        lines += [f"{path}: not converted: {reason}" for path, reason in self["not_converted"].items()]
        for path, stats in self["modules"].items():
            served = self["served"][path]
            misses = "".join(f", {count} original ({reason})" for reason, count in served["misses"].items())
            report = report_text(json_ready(stats), path)
            lines.append(f"\n{report}\nin a run of the pipeline: {served['hits']} calls ran fused{misses}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "".join(fragment(json_ready(stats)) for stats in self["modules"].values())


def is_pipeline(value: Any, has_example: bool, example_calls: Any) -> bool:
    """Whether a recorded run has to find the modules to convert: ``value`` is not a module, or a module of which only
    other methods than ``forward`` have examples."""
    if isinstance(value, nn.Module):
        return bool(example_calls) and not has_example
    return not isinstance(value, type) and (callable(value) or bool(example_calls))


def calls_of(pipeline: Any, example_inputs: Any, example_calls: Mapping[str, Any]) -> list[Callable[[], Any]]:
    """Returns the example calls of ``pipeline`` and of its methods.

    Raises:
        ConversionError: there is no example.
    """
    if example_inputs is None and not example_calls:
        raise ConversionError(f"a {type(pipeline).__name__} needs example_inputs: the arguments of a call of it")
    given = [] if example_inputs is None else [(pipeline, example_inputs)]
    given += [(getattr(pipeline, method), inputs) for method, inputs in example_calls.items()]
    found: list[Callable[[], Any]] = []
    for function, inputs in given:
        if isinstance(inputs, Mapping):
            found.append(partial(function, **inputs))
        else:
            found.append(partial(function, *(inputs if isinstance(inputs, tuple) else (inputs,))))
    return found


def run(calls: list[Callable[[], Any]]) -> None:
    """Runs the calls without gradients, and restores the random generators.

    Raises:
        ConversionError: a call raises an error.
    """
    try:
        with same_generators(), torch.no_grad():
            for call in calls:
                call()
    except Exception as error:  # the pipeline's own code may raise anything
        raise ConversionError(f"the example calls of the pipeline raise an error: {first_line(error)}") from error


def served(converted: Mapping[str, nn.Module], calls: list[Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Runs the calls. Returns the hits and misses of the programs of each of the ``converted`` modules by path, and
    resets their counters."""
    infos = {path: vars(module)["kfconvert_info"] for path, module in converted.items()}
    with quiet_thread():
        run(calls)
    found = {}
    for path, info in infos.items():
        counts = info()
        programs = [counts["guard"], *counts["parts"].values()]
        misses = sum((Counter(each["misses"]) for each in programs), Counter())
        found[path] = {"hits": sum(each["hits"] for each in programs), "misses": dict(misses)}
        info.__self__.reset_counters()
    return found


def recorded(pipeline: Any, calls: list[Callable[[], Any]]) -> dict[str, tuple[nn.Module, Any]]:
    """Runs ``calls``. Returns by path each module that they call outside of other modules, with its example inputs: a
    copy of the arguments of its ``generate()``, or of its calls with the most frequent shapes and dtypes, the last of
    several. Single layers are left out.

    Raises:
        ConversionError: a call raises an error, or calls no such module.
    """
    found: _Calls = {}
    with _recording(found):
        run(calls)
    inner = {each for module in found for each in module.modules() if each is not module}
    modules = [module for module in found if module not in inner]
    if not modules:
        raise ConversionError(f"a run of {type(pipeline).__name__} calls no torch.nn.Module with submodules")
    paths = _paths(pipeline)
    names: dict[str, tuple[nn.Module, Any]] = {}
    for module in modules:
        path = paths.get(module, type(module).__name__)
        _, example = max(reversed(found[module].values()), key=lambda counted: counted[0])
        names[path if path not in names else f"{path}_{len(names)}"] = module, example
    return names


@contextmanager
def _recording(found: _Calls) -> Iterator[None]:
    """Context manager that adds to ``found`` the calls that this thread makes outside of other modules."""
    here, depth = ThisThread(), 0

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            # A module without submodules is a layer, or holds a model in an object.
            if not (here and module._modules):
                return original(module, *args, **kwargs)
            if not depth:
                _count(found.setdefault(module, {}), _by_name(module, args, kwargs))
            depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return call

    def generating(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            prompt = _prompt(model, inputs, kwargs) if here and not depth else {}
            if prompt:
                found.setdefault(model, {"generate": (math.inf, _copied(prompt))})
            return original(model, inputs, *args, **kwargs)

        return generate

    with ExitStack() as stack:
        stack.enter_context(method_over(nn.Module, "__call__", calling))
        if (transformers := sys.modules.get("transformers.generation.utils")) is not None:
            stack.enter_context(method_over(transformers.GenerationMixin, "generate", generating))
        try:
            yield
        finally:
            here.over = True


def _count(known: dict[str, tuple[float, Any]], example: dict[str, Any] | tuple[Any, ...]) -> None:
    kind = call_of(example).summary()
    if kind in known:
        count, first = known[kind]
        known[kind] = count + 1, first
    elif len(known) < _MOST_KINDS:
        known[kind] = 1, _copied(example)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | tuple[Any, ...]:
    """Returns the arguments of a call by their names, or the positional ones if some have no name."""
    try:
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return args
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) and name in bound:
            return args
    return dict(bound)


def _prompt(model: Any, inputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``model.generate`` that its forward also has, with tokens for a decoder."""
    main = getattr(model, "main_input_name", "input_ids")
    named = {name: value for name, value in {main: inputs, **kwargs}.items() if isinstance(value, Tensor)}
    prompt = {name: value for name, value in named.items() if name in inspect.signature(model.forward).parameters}
    if main not in prompt:
        return {}
    if is_encoder_decoder(model):
        rows, start = prompt[main].shape[0], getattr(model.generation_config, "decoder_start_token_id", None)
        prompt["decoder_input_ids"] = torch.full((rows, 2), start or 0, device=prompt[main].device)
    return prompt


def _copied(values: Any) -> Any:
    """Returns a copy of the arguments of a call, which the call may change."""

    def copied(leaf: Any) -> Any:
        return copy_of(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    with torch.inference_mode(False):
        return pytree.tree_map(to_each(copied), values)


def _paths(pipeline: Any) -> dict[nn.Module, str]:
    """Returns the path of each module in the attributes of ``pipeline``, and of objects, lists and dicts in these."""
    found: dict[nn.Module, str] = {}
    seen, pending = set[int](), [("", pipeline)]
    for _ in range(_DEPTH):
        values = [(path, value) for path, value in pending if id(value) not in seen]
        seen |= {id(value) for _, value in values}
        for path, value in values:
            if isinstance(value, nn.Module):
                for name, module in value.named_modules(prefix=path):
                    found.setdefault(module, name)
        pending = [(f"{path}.{name}".lstrip("."), each) for path, value in values for name, each in _held(value)]
    return found


def _held(value: Any) -> list[tuple[str, Any]]:
    """Returns the attributes or items of ``value`` that may hold modules, by name."""
    if isinstance(value, (Tensor, type, ModuleType, FunctionType)):
        return []
    if isinstance(value, Mapping):
        items: Any = value.items()
    else:
        items = enumerate(value) if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).items()
    kinds = (Mapping, list, tuple)
    return [(str(name), each) for name, each in items if isinstance(each, kinds) or hasattr(each, "__dict__")]
