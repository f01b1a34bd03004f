"""Export of a converted model as a ``torch.export`` program: its graph with the fused operators, and its weights."""

from __future__ import annotations

import inspect
import operator
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from ..capture import compiling_in_this_thread
from ..conversion import first_line
from ..inputs import ExampleCall, InputError, example_call
from ..process import one_at_a_time, shielded
from ..region import Guard, Region
from ..runtime import GuardedForward, Variant, guarded_forward
from .errors import ArtifactError, writing
from .lost_gradients import loses_gradients

# Functions of sizes in SymPy's notation.
_FUNCTIONS = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def export(model: nn.Module, example_inputs: Any, path: str | os.PathLike | None = None) -> ExportedProgram:
    """Exports ``model`` as a program that calls the fused operators; writes it to ``path`` if given.

    Sizes that were free in the conversion (batch, sequence) are free in the program, with the same bounds. It raises an
    error for other sizes, and for unsupported strides. Call it with the same positional arguments and keywords as in
    the example. A process that loads it must first import kfconvert, for the operators. Then
    ``torch.export.load(path).module()`` runs, with gradients. An AOTInductor package of the program
    (``torch._inductor.aoti_compile_and_package``) runs too, for inference only. If the forward uses a
    ``torch.autograd.Function`` or ``torch.no_grad()``, a warning says that gradients of the program may differ.

    During the export other threads may call other models; their conversions and exports wait.

    Args:
        model: a converted model.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments, as for
            ``ModelConverter.convert_model``.
        path: the file to write, usually with the extension .pt2.

    Raises:
        ArtifactError: ``model`` was not converted as a whole, runs its original forward for these inputs, cannot be
            exported, or the file cannot be written.
    """
    guarded = guarded_forward(model) if isinstance(model, nn.Module) else None
    if guarded is None or not guarded.is_converted:
        reason = "it was not converted as a whole"
        if hasattr(model, "kfconvert_info"):
            reason = "nothing is fused in the model as a whole; use torch.export.export"
        raise ArtifactError(f"cannot export {type(model).__name__}: {reason}")
    with one_at_a_time():
        call = _example(guarded, example_inputs)
        with shielded(), compiling_in_this_thread():
            variant, leaves = _serving(guarded, call)
            program = _exported(guarded, variant, *_with_free_sizes(guarded, variant.region, leaves, call))
    if loses_gradients(model, call):
        warnings.warn(
            f"kfconvert: the exported program of {type(model).__name__} is for inference only, its gradients may "
            "differ, as the forward uses a torch.autograd.Function or torch.no_grad().",
            RuntimeWarning,
            stacklevel=2,
        )
    if path is not None:
        with writing(Path(path)):
            torch.export.save(program, path)
    return program


def _example(guarded: GuardedForward, example_inputs: Any) -> ExampleCall:
    """Returns the call to export, on the model's device."""
    model = guarded.model
    tensor = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
    try:
        device = torch.device("cpu") if tensor is None else tensor.device
        return example_call(model, None, example_inputs, device, None)
    except InputError as error:
        raise ArtifactError(f"cannot export: {error}") from None


def _serving(guarded: GuardedForward, call: ExampleCall) -> tuple[Variant, list[Any]]:
    """Returns the variant whose program serves ``call``, and the flat arguments."""
    state: Any = guarded.state
    reason = guarded.state_refusal() or state.hooked_backward
    if reason is None and state.asks_for_gradients:
        reason = f"its code asks for {state.asks_for_gradients}"
    for variant in guarded.candidates((len(call.args), *call.kwargs)) if reason is None else ():
        leaves: Any = variant.region.call.leaves(call.args, call.kwargs)
        reason = variant.refusal(leaves) or _unexportable(variant)
        if reason is None:
            return variant, leaves
    raise ArtifactError(f"cannot export the fusions for ({call.summary()}): {reason or guarded.other_form()}")


def _unexportable(variant: Variant) -> str | None:
    """Returns why an exported program cannot replace the program of ``variant``; None if it can."""
    region = variant.region
    if region.autocast is not None:
        return "it was converted under autocast"
    if region.is_random:
        return "it draws random numbers"
    if region.has_caches:
        return "it takes or returns a key-value cache"
    if region.has_effects:
        return "it writes to its arguments, or asserts conditions on their values"
    if region.communicates or region.shards:
        return "it reads shards of distributed parameters, or waits for other ranks"
    if any(strides is not True for strides in variant.strides):
        return "the graph requires the strides of an argument of the example, which is not contiguous"
    return None


def _traced(variant: Variant, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs the program under the guard's conditions on sizes; torch.export traces this function."""
    leaves: Any = variant.region.call.leaves(args, kwargs)
    values: dict[sympy.Symbol, Any] = {}
    guard = variant.region.guard
    for tensor in guard.tensors:
        for size, actual in zip(tensor.sizes, leaves[tensor.index].shape):
            if isinstance(size, sympy.Symbol):
                torch._check(actual == values.setdefault(size, actual))
    for symbol, size in values.items():
        lower, upper = guard.bounds(symbol)
        torch._check(size >= lower)
        if upper is not None:
            torch._check(size <= upper)
    for tensor in guard.tensors:
        for size, actual in zip(tensor.sizes, leaves[tensor.index].shape):
            if not isinstance(size, (int, sympy.Symbol)):
                torch._check(actual == _value(size, values))
    for constraint in guard.constraints:
        torch._check(_value(constraint, values))
    # A graph has no conditions on strides. Only a contiguous tensor allows a view that flattens all dimensions.
    for index in variant.program.laid_out:
        leaves[index] = leaves[index].view(-1).view(leaves[index].shape)
    return variant.traced(leaves)


def _value(expression: sympy.Basic, values: dict[sympy.Symbol, Any]) -> Any:
    """Returns ``expression`` with ``values`` for its symbols; these may be sizes of a trace."""
    return sympy.lambdify(list(values), expression, [_FUNCTIONS, "math"])(*values.values())


def _exported(guarded: GuardedForward, variant: Variant, call: ExampleCall, sizes: dict[str, Any]) -> ExportedProgram:
    model = guarded.model
    export = partial(torch.export.export, model, call.args, call.kwargs)
    guarded.exported = partial(_traced, variant)
    with torch.no_grad(), variant.program.restored():
        try:
            try:
                program = export(dynamic_shapes=sizes)
            except RuntimeError as error:
                # An operator of PyTorch may accept fewer sizes than the region; PyTorch then names these sizes.
                _, told, fixes = str(error).partition("Suggested fixes:")
                if not told:
                    raise
                fixes = told + fixes.strip().partition("\n\n")[0]
                program = export(dynamic_shapes=refine_dynamic_shapes_from_suggested_fixes(fixes, sizes))
        except Exception as error:  # the model's code runs, and may raise anything
            raise ArtifactError(f"torch.export cannot export {type(model).__name__}: {first_line(error)}") from error
        finally:
            guarded.exported = None
    _refuse_ones(program)
    return program


def _refuse_ones(program: ExportedProgram) -> None:
    """Make ``program`` reject a size of 1 if its bounds do. The program itself does not check a lower bound of 2,
    which is also the initial assumption of torch.export."""
    graph, signature = program.graph, program.graph_signature
    bounded = {symbol for symbol, bounds in program.range_constraints.items() if bounds.lower == 2}
    if not bounded:
        return
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.name in signature.user_inputs]
    sizes = {
        size.node.expr: (node, dimension, size)
        for node in inputs
        if isinstance(node.meta.get("val"), Tensor)
        for dimension, size in enumerate(node.meta["val"].shape)
        if isinstance(size, torch.SymInt) and size.node.expr in bounded
    }
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for node, dimension, size in sizes.values():
            length = graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
            suffices = graph.call_function(operator.ge, (length, 2))
            length.meta["val"], suffices.meta["val"] = size, size >= 2
            message = f"kfconvert: dimension {dimension} of {node.name} must be at least 2"
            graph.call_function(torch.ops.aten._assert_scalar.default, (suffices, message))
    program.graph_module.recompile()


def _with_free_sizes(
    guarded: GuardedForward, region: Region, leaves: list[Any], call: ExampleCall
) -> tuple[ExampleCall, dict[str, Any]]:
    """Returns ``call`` with at least two entries in each free size, since torch.export treats a 1 as fixed, and the
    free sizes of its arguments in the form of ``dynamic_shapes``."""
    guard, leaves = region.guard, list(leaves)
    free: list[dict[int, Any] | None] = [{} if isinstance(leaf, Tensor) else None for leaf in leaves]
    dimensions = {place: _dimension(guard, name) for name, places in guard.free.items() for place in places}
    for tensor in guard.tensors:
        for place in ((tensor.index, i) for i, size in enumerate(tensor.sizes) if not isinstance(size, int)):
            index, dimension = place
            free[index][dimension] = dimensions.get(place, Dim.AUTO)  # type: ignore[index]  # the entry of a tensor
            if leaves[index].shape[dimension] == 1:
                leaves[index] = torch.cat([leaves[index], leaves[index]], dimension)
    names = region.call.positional[: len(call.args)]
    given, sizes = region.call.keywords(leaves), region.call.keywords(free)
    larger = ExampleCall(
        tuple(given.get(name, value) for name, value in zip(names, call.args)),
        {name: given.get(name, value) for name, value in call.kwargs.items()},
    )
    keywords = {name: sizes.get(name) for name in call.kwargs}
    return larger, inspect.signature(guarded).bind(*map(sizes.get, names), **keywords).arguments


def _dimension(guard: Guard, name: str) -> Any:
    """Returns the free size ``name`` for torch.export: one object for all its uses."""
    size = guard.size(guard.free[name][0])
    if not isinstance(size, sympy.Symbol):
        return Dim.AUTO
    lower, upper = guard.bounds(size)
    return Dim(name, min=lower, max=upper)
