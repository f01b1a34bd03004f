"""A converted model as a program of ``torch.export``: its graph, with the fused operators in it, and its weights."""

from __future__ import annotations

import inspect
import operator
import os
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from ..capture import compiling_in_this_thread
from ..conversion import first_line
from ..inputs import ExampleCall, InputError, example_call
from ..process import Shield, one_at_a_time
from ..region import Guard, Region
from ..runtime import ELEMENTS, GuardedForward, Variant, guarded_forward
from .files import ArtifactError

# Functions of sizes as SymPy prints them.
_FUNCTIONS = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def export(model: nn.Module, example_inputs: Any, path: str | os.PathLike | None = None) -> ExportedProgram:
    """``model`` as a program that calls the fused operators; written to ``path`` where one is given.

    The sizes that were left free at the conversion (batch, sequence) are free in it, within the same bounds; it fails
    for others, and for arguments that lie in memory as the model does not take them. It is called as in the example:
    with the same positional arguments and keywords. A process that loads it imports kfconvert before, for the
    operators: ``torch.export.load(path).module()`` then runs, and has gradients. So does one that runs a package which
    AOTInductor made of it (``torch._inductor.aoti_compile_and_package``), for inference only. Where the forward uses a
    ``torch.autograd.Function`` or ``torch.no_grad()``, a warning says that gradients of the program may differ.

    Meanwhile other threads may call other models; their conversions and exports wait.

    Args:
        model: a converted model.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments, as for
            ``ModelConverter.convert_model``.
        path: the file to write, by custom with the ending .pt2.

    Raises:
        ArtifactError: ``model`` was not converted as a whole, runs its original forward for these inputs, cannot be
            exported, or the file cannot be written.
    """
    guarded = guarded_forward(model) if isinstance(model, nn.Module) else None
    if guarded is None and hasattr(model, "kfconvert_info"):
        reason = "nothing is fused in it as a whole; torch.export.export takes it as it is"
        raise ArtifactError(f"cannot export {type(model).__name__}: {reason}")
    if guarded is None:
        raise ArtifactError(f"cannot export: {type(model).__name__} is no model that was converted as a whole")
    with one_at_a_time():
        call = _example(guarded, example_inputs)
        with Shield(), compiling_in_this_thread():
            variant, leaves = _serving(guarded, call)
            program = _exported(guarded, variant, *_with_free_sizes(guarded, variant.region, leaves, call))
    lost = _lost_gradient(variant.region)
    if lost is not None:
        guarded.notices.compilers.give_for_inference(
            f"the captured graph may compute another gradient of {lost}, as the forward uses a torch.autograd.Function "
            "or torch.no_grad()"
        )
    if path is not None:
        try:
            torch.export.save(program, path)
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"cannot write {ascii(str(path))[1:-1][:200]}: {first_line(error)}") from error
    return program


def _example(guarded: GuardedForward, example_inputs: Any) -> ExampleCall:
    """The call to export, on the device of the model, whose weights are brought there."""
    if guarded.frozen is not None:
        guarded.frozen.bring_back("it is exported")
    model = guarded.model
    tensor = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
    try:
        device = torch.device("cpu") if tensor is None else tensor.device
        return example_call(model, None, example_inputs, device, None)
    except InputError as error:
        raise ArtifactError(f"cannot export: {error}") from None


def _serving(guarded: GuardedForward, call: ExampleCall) -> tuple[Variant, list[Any]]:
    """The variant whose program serves ``call``, and the flat arguments."""
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
    """Why no exported program can do what the program of ``variant`` does; None where one can."""
    region = variant.region
    if region.is_random:
        return "it draws random numbers"
    if region.has_caches:
        return "it takes or returns a key-value cache"
    if region.has_effects:
        return "it writes to its arguments, or asserts what depends on their values"
    if region.asked - {ELEMENTS}:
        return f"its code asks for {', '.join(sorted(region.asked))} of tensors"
    if region.communicates or region.shards:
        return "it reads shards of distributed parameters, or waits for other ranks"
    if any(fact is not True for _, _, fact in variant.strides):
        return "the strides of an argument of the conversion's example were not contiguous, and have to stay so"
    return None


def _lost_gradient(region: Region) -> str | None:
    """The first parameter or argument that gets another gradient from the graph than from the original."""
    for name in filter(region.lost_gradients.__contains__, (*region.slots, *region.inputs)):
        return ".".join(filter(None, region.slots.get(name, ("", name))))
    return None


def _traced(variant: Variant, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What torch.export traces: the program on tensors without data, under the conditions of the guard on sizes."""
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
    # A graph has no conditions on strides. A view of all dimensions as one can be made of contiguous tensors only.
    for index in variant.program.laid_out:
        leaves[index] = leaves[index].view(-1).view(leaves[index].shape)
    return variant.traced(leaves)


def _value(expression: sympy.Basic, values: dict[sympy.Symbol, Any]) -> Any:
    """``expression`` with ``values`` in the place of its symbols, which may be sizes of a trace."""
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
                # An operator of PyTorch may take fewer sizes than the region; PyTorch says which, then.
                _, told, fixes = str(error).partition("Suggested fixes:")
                if not told:
                    raise
                fixes = told + fixes.strip().partition("\n\n")[0]
                program = export(dynamic_shapes=refine_dynamic_shapes_from_suggested_fixes(fixes, sizes))
        except Exception as error:  # the model's own code runs, which may raise anything
            raise ArtifactError(f"torch.export cannot export {type(model).__name__}: {first_line(error)}") from error
        finally:
            guarded.exported = None
    _refuse_ones(program)
    return program


def _refuse_ones(program: ExportedProgram) -> None:
    """Let ``program`` refuse a size of 1 where its bounds do. It takes a lower bound of 2 for the assumption that
    torch.export begins with, and does not look at it when it is called."""
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
            message = f"kfconvert: dimension {dimension} of {node.name} has to be at least 2"
            graph.call_function(torch.ops.aten._assert_scalar.default, (suffices, message))
    program.graph_module.recompile()


def _with_free_sizes(
    guarded: GuardedForward, region: Region, leaves: list[Any], call: ExampleCall
) -> tuple[ExampleCall, dict[str, Any]]:
    """``call`` with at least two entries in each free size, as torch.export takes a 1 for a fixed size; and which sizes
    of its arguments are free, in the form of ``dynamic_shapes``."""
    guard, leaves = region.guard, list(leaves)
    free: list[dict[int, Any] | None] = [{} if isinstance(leaf, Tensor) else None for leaf in leaves]
    dimensions = {place: _dimension(guard, name) for name, places in guard.free.items() for place in places}
    for tensor in guard.tensors:
        for place in ((tensor.index, i) for i, size in enumerate(tensor.sizes) if not isinstance(size, int)):
            index, dimension = place
            free[index][dimension] = dimensions.get(place, Dim.AUTO)  # type: ignore[index]  # it is a tensor's
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
    """The free size ``name`` for torch.export: the same wherever it stands."""
    size = guard.size(guard.free[name][0])
    if not isinstance(size, sympy.Symbol):
        return Dim.AUTO
    lower, upper = guard.bounds(size)
    return Dim(name, min=lower, max=upper)
