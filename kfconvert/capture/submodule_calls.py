"""Records the inputs of a model's submodules in a run of the model, by hooks."""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import CellType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..accuracy import model_outputs
from ..inputs import ExampleCall, is_whole
from ..region import Region, given_as
from ..runtime import OF_EVERY_MODULE
from ..torch_state import is_dense, is_transformed
from .structure import inside


def outlines(model: nn.Module, call: ExampleCall, modules: Iterable[nn.Module]) -> dict[nn.Module, ExampleCall]:
    """Return the most frequent inputs of each of ``modules`` in ``call`` of ``model``; uncalled modules are missing.

    The tensors are on the meta device: they have only sizes, strides and dtypes.

    Raises:
        Exception: any error of the model for this call.
    """
    met: dict[nn.Module, dict[Hashable, list[ExampleCall]]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outline = ExampleCall(args, kwargs).map_tensors(_outline)
        met.setdefault(module, {}).setdefault(kind_of(outline), []).append(outline)

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    _run_once(model, call, handles)
    return {module: max(kinds.values(), key=len)[0] for module, kinds in met.items()}


def observe(
    model: nn.Module,
    call: ExampleCall,
    modules: Iterable[nn.Module],
    like: Mapping[nn.Module, ExampleCall] = MappingProxyType({}),
) -> dict[nn.Module, ExampleCall]:
    """Return the first call of each of ``modules`` during ``call`` of ``model``, of the kind of the call in ``like`` if
    given; a module without such a call is missing. The tensors are copies, as a later write would change them.

    Raises:
        Exception: any error of the model for this call.
    """
    calls: dict[nn.Module, ExampleCall] = {}
    kinds = {module: kind_of(each) for module, each in like.items()}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received = ExampleCall(args, kwargs)
        if module not in calls and kinds.get(module) in (None, kind_of(received)):
            calls[module] = received.copied()

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    _run_once(model, call, handles)
    return calls


def kind_of(call: ExampleCall) -> Hashable:
    """A key that is equal for calls of equal structure and flags, whose tensors have equal sizes, strides, dtypes and
    identities."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    kinds = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.dtype, leaf.dim() if _is_opaque(leaf) else (leaf.shape, leaf.stride())))
        else:
            kinds.append(leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf))
    return repr(spec), tuple(kinds), given_as([leaf for leaf in leaves if isinstance(leaf, Tensor)])


def refusals(
    model: nn.Module, call: ExampleCall, regions: Iterable[tuple[nn.Module, Region]]
) -> dict[nn.Module, str | None]:
    """Return, by module, the reason why the guard of its region rejects its inputs in ``call``; None where it accepts
    one. Uncalled modules are missing.

    Raises:
        Exception: any error of the model for this call.
    """
    found: dict[nn.Module, str | None] = {}

    def checked(region: Region) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves = region.call.leaves(args, kwargs)
            reason = "the call has other arguments" if leaves is None else region.guard.refusal(leaves)
            if reason is None or module not in found:
                found[module] = reason

        return hook

    handles = [module.register_forward_pre_hook(checked(region), with_kwargs=True) for module, region in regions]
    _run_once(model, call, handles)
    return found


def seconds_within(model: nn.Module, call: ExampleCall) -> dict[nn.Module, float]:
    """Return the seconds of each module in one run of ``call``; for a module that is not called itself, such as a list
    of layers, the sum over its children.

    Raises:
        Exception: any error of the model for this call.
    """
    taken: dict[nn.Module, float] = {}
    begun: list[float] = []
    wait = torch.cuda.synchronize if any(tensor.is_cuda for tensor in call.tensors()) else lambda: None

    def before(module: nn.Module, _: Any) -> None:
        wait()
        begun.append(time.perf_counter())

    def after(module: nn.Module, *_: Any) -> None:
        wait()
        taken[module] = taken.get(module, 0.0) + time.perf_counter() - begun.pop()

    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
    _run_once(model, call, handles)
    for module in reversed(list(model.modules())):  # parents come before their children
        if module not in taken:
            taken[module] = sum(taken.get(child, 0.0) for child in module.children())
    return taken


def irregular(model: nn.Module, call: ExampleCall) -> dict[nn.Module, str]:
    """Return the modules for which a graph would be incomplete, each with the reason, as one run of ``call`` shows.

    There are four reasons. A list, dict or plain object of the module or a submodule changes, or is replaced,
    between its call and the end of the run: its content is not constant. The module returns a value with
    attributes, which no graph can create. It writes to a list or dict among its arguments. Or it holds a method of, or
    reference to, a module around it, and so can read state that its own program does not watch.

    Raises:
        Exception: any error of the model for this call.
    """
    found: dict[str, dict[str, Any]] = {}
    carrying: dict[nn.Module, str] = {}

    def keeper(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            if path not in found:
                found[path] = _objects(module)

        return hook

    given: list[tuple[list[Any], pytree.TreeSpec] | None] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_containers = any(isinstance(value, (list, dict)) for value in (*args, *kwargs.values()))
        given.append(pytree.tree_flatten((args, kwargs)) if has_containers else None)

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        name, known = attribute_of(outputs), given.pop()
        if name is not None:
            carrying.setdefault(module, f"its output has the attribute {name}")
        leaves, spec = known or ([], None)
        now, form = pytree.tree_flatten((args, kwargs)) if known else ([], None)
        if form != spec or not all(map(operator.is_, leaves, now)):
            carrying.setdefault(module, "its forward writes to a list or dict among its arguments")

    shared = [(path, module) for path, module in model.named_modules() if _objects(module)]
    handles = [module.register_forward_pre_hook(keeper(path)) for path, module in shared]
    handles += [module.register_forward_pre_hook(before, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    _run_once(model, call, handles)
    after = {path: _objects(module) for path, module in shared}
    changed = around(
        model,
        (
            (path, name)
            for path, before in found.items()
            for name in before | after[path]
            if before.get(name) != after[path].get(name)
        ),
    )
    read = {module: f"it may read {name}, which changes while the model runs" for module, name in changed.items()}
    return carrying | read | _looking_out(model)


def _looking_out(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that can reach a module of ``model`` outside of themselves through a callable that they hold."""
    modules = set(model.modules())
    ways = [
        (module, name, other)
        for module in modules
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and callable(value) and not isinstance(value, nn.Module)
        for other in _behind(value)
        if other in modules
    ]
    found = {}
    for holder, name, other in ways:
        for module in modules:
            inner = set(module.modules())
            if holder in inner and other not in inner:
                found[module] = f"it reaches its parent {type(other).__name__} through {name}"
    return found


def _behind(value: Any) -> list[nn.Module]:
    """The modules behind a method, a weak reference, a partial function, or a function with these in its closure."""
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, MethodType):
        return _behind(value.__self__)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return [module for each in parts for module in _behind(each)]
    cells = getattr(value, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if cell != _EMPTY]
    return [module for each in held if not callable(each) or isinstance(each, _WAYS) for module in _behind(each)]


_EMPTY = CellType()
_WAYS = (nn.Module, weakref.ref, MethodType, functools.partial)


def _run_once(model: nn.Module, call: ExampleCall, handles: Iterable[RemovableHandle]) -> None:
    """Run the hooked model, and remove the hooks."""
    try:
        model_outputs(model, call.args, call.kwargs, call.method)
    finally:
        for handle in handles:
            handle.remove()


def around(model: nn.Module, attributes: Iterable[tuple[str, str]]) -> dict[nn.Module, str]:
    """The modules with one of the ``attributes``, given by module path and name, or with such a submodule, each with
    the dotted name of its first such attribute."""
    found: dict[nn.Module, str] = {}
    for path, name in attributes:
        pieces = path.split(".") if path else []
        for count in range(len(pieces) + 1):
            found.setdefault(model.get_submodule(".".join(pieces[:count])), ".".join((*pieces[count:], name)))
    return found


def _objects(module: nn.Module) -> dict[str, Any]:
    """The contents of lists, dicts and plain objects among the attributes of ``module``, except ``config``, which no
    run changes."""
    return {
        name: (id(value), inside(value))
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and name != "config" and not callable(value) and _holds_values(value)
    }


def _holds_values(value: Any) -> bool:
    return isinstance(value, (list, set, dict)) or hasattr(value, "__dict__")


def _outline(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter) or _is_opaque(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def sizes(leaves: list[Any]) -> list[tuple[int, ...] | None]:
    """The shape of each tensor among ``leaves``, None for others."""
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]


def opaque_kind(values: Any) -> str | None:
    """Describe the first value, also in tuples, lists and dicts, that is neither a number, string or the like nor a
    tensor with a shape and its elements in memory."""
    kinds = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
    leaves = pytree.tree_leaves(values, is_leaf=is_whole)
    opaque = (leaf for leaf in leaves if not isinstance(leaf, kinds) or _is_opaque(leaf))
    return next((_in_words(leaf) for leaf in opaque), None)


def _in_words(value: Any) -> str:
    name = type(value).__name__
    if not isinstance(value, Tensor) or is_transformed(value):
        return name
    if value.is_nested or value.is_quantized:
        return f"{'nested' if value.is_nested else 'quantized'} {name}"
    return name if value.layout is torch.strided else f"{name} of layout {str(value.layout).removeprefix('torch.')}"


def _is_opaque(value: Any) -> bool:
    """Whether a tensor has no usual shape, strides or memory: a nested tensor, one within ``torch.vmap``, a quantized
    or a sparse one."""
    return isinstance(value, Tensor) and (is_transformed(value) or not is_dense(value))


def attribute_of(outputs: Any) -> str | None:
    """The name of an attribute of ``outputs``, or of a value in them, that the same value from a program would lack."""
    if isinstance(outputs, Tensor):
        named = [*vars(outputs)] if type(outputs) in (Tensor, nn.Parameter) else []
        return named[0] if named else "requires_grad" if outputs.requires_grad and outputs.is_leaf else None
    values, spec = pytree.tree_flatten(outputs, is_leaf=lambda value: value is not outputs)
    if len(values) == 1 and values[0] is outputs:
        return None
    anew = vars(pytree.tree_unflatten(values, spec)) if hasattr(outputs, "__dict__") else {}
    own = [name for name in getattr(outputs, "__dict__", {}) if name not in anew]
    return own[0] if own else next(filter(None, map(attribute_of, values)), None)
