"""Captures a module as a Region: a flat ATen graph, the live tensors it reads, and the guard it is valid under."""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..canonical import KeptContiguous
from ..graph import location, place_now
from ..inputs import (
    CallForm,
    ExampleCall,
    TreeForm,
    UnknownCache,
    described,
    holds_tokens,
    is_equal,
    numbered,
    taken_apart,
)
from ..process import OF_SHARD, forward_over, one_at_a_time, quiet_thread, shielded
from ..region import CaptureError, Dimensions, Read, Region, guard_from_placeholders
from ..runtime import recorded_reads
from ..torch_state import autocast_dtype, is_transformed
from .alike_layers import Stack, shortened
from .autocast import write_casts
from .compiler_questions import AskedForCompilers, no_compiler_asked_for
from .deadline import Deadline
from .inner_tensors import take_inner_tensors
from .lean_graphs import lean_graphs
from .left_out_caches import with_one_tensor, with_own_tensors
from .local_shards import local_shards

CACHE_IN_OUTPUT = (
    "torch.export: the output holds a key-value cache; set model.config.use_cache = False, or pass use_cache=False in "
    "example_inputs and in later calls"
)


class _Raised(Exception):
    """Wraps a RuntimeError of a traced forward, for which the exporter would print the graph to ``sys.stderr``."""

    def __init__(self, error: RuntimeError):
        super().__init__(str(error))
        self.error = error


def trace(
    model: nn.Module,
    call: ExampleCall,
    dimensions: Mapping[str, Dimensions] | None = None,
    seconds: float = math.inf,
    stacks: Sequence[Stack] = (),
) -> Region:
    """Capture ``model`` as called in ``call``.

    Args:
        dimensions: the sizes that may vary later; ``free_dimensions`` by default.
        seconds: the limit of processor time.
        stacks: lists of alike layers, of which only the first ones are traced (see ``alike_layers``).

    Raises:
        CaptureError: the time is up, ``torch.export`` rejects the module, or the graph has disallowed effects (it
            writes to a buffer, a parameter or an argument).
    """
    form = call_form(model, call)
    leaves = form.leaves(call.args, call.kwargs)
    if dimensions is None:
        dimensions = free_dimensions(model, call)
    # Each argument becomes a separate tensor. Otherwise the graph would have a single value for a tensor that is
    # passed twice or is a weight of the model, also in later calls with different tensors.
    widened = [_dense(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    dynamic: list[dict[int, Any] | None] = [None] * len(leaves)
    for index, dimension in (place for group in dimensions.values() for place in group):
        # The exporter treats a size of 1 as constant.
        if leaves[index].shape[dimension] == 1:
            widened[index] = torch.cat([widened[index]] * 2, dimension)
        dynamic[index] = {**(dynamic[index] or {}), dimension: Dim.AUTO}
    shapes = form.lists(dynamic)
    widened = with_one_tensor(widened, form.form, stacks)
    with one_at_a_time(), recorded_reads(model) as reads:
        arguments = form.lists(widened)
        # A Deadline slows down every operator call, so it is skipped where the seconds are unlimited.
        limit = nullcontext() if seconds == math.inf else Deadline(seconds)
        with (
            limit,
            _same_containers(model),
            shortened(model, stacks),
            _traceable(model, form, dimensions) as forms,
            local_shards(model) as shards,
        ):
            program = _export(model, arguments, shapes)
    outputs = forms[-1] if forms[-1].holds_caches else TreeForm(program.call_spec.out_spec, {})
    example = described(form.keywords(leaves))
    region = _region(model, program, form, dimensions, example, frozenset(reads), outputs)
    region.shards = frozenset(name for name, slot in region.slots.items() if slot in shards)
    region.inner.update(dict.fromkeys(region.shards, OF_SHARD))
    take_inner_tensors(region)
    with_own_tensors(region, stacks)
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *call.tensors())}
    on = [(kind, dtype) for kind in sorted(kinds) if (dtype := autocast_dtype(kind)) is not None]
    if len(on) > 1:
        raise CaptureError("it computes on several kinds of devices under autocast")
    if on:
        (region.autocast,) = on
        write_casts(region)
    return region


def free_dimensions(
    model: nn.Module, call: ExampleCall, free: Collection[str] = ("batch", "sequence")
) -> dict[str, Dimensions]:
    """Return the places of the ``free`` sizes among the flat arguments of ``call``.

    "batch" is dimension 0 of every tensor argument, and free only where all agree on it; "sequence" is dimension 1 of
    integer tensors (token ids, masks). Lengths that differ from the first such tensor's, and the length of a decoder's
    inputs, are separate free sizes, "sequence_2" and so on. Image sizes stay fixed: free image sizes would extend the
    capture of windowed attention to minutes.

    Raises:
        CaptureError: the signature of ``model`` does not name all arguments of ``call``.
    """
    form = call_form(model, call)
    leaves = form.leaves(call.args, call.kwargs)
    tensors = [(index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found = {}
    batch = [(index, 0) for index, tensor in tensors if tensor.dim() > 0]
    if "batch" in free and len({leaves[index].shape[0] for index, _ in batch}) == 1:
        found["batch"] = batch
    if "sequence" in free:
        names = form.lists(list(range(len(leaves)))).items()
        of_decoder = {i for name, inner in names if name.startswith("decoder_") for i in pytree.tree_leaves(inner)}
        lengths: dict[tuple[int, bool], Dimensions] = {}
        for index, tensor in tensors:
            if holds_tokens(tensor):
                lengths.setdefault((tensor.shape[1], index in of_decoder), []).append((index, 1))
        found |= {numbered("sequence", number): dimensions for number, dimensions in enumerate(lengths.values())}
    return found


@contextmanager
def _traceable(model: nn.Module, form: CallForm, dimensions: Mapping[str, Dimensions]):
    """Context manager under which ``model`` runs ``shielded`` and first asserts which argument sizes are equal:
    operators that discover it later would add symbols to the graph.

    It receives lists instead of caches, see ``CallForm.lists``. With a cache among its arguments or outputs it returns
    flat values, whose forms are added to the list that the context manager yields.
    """
    original = model.forward
    modes: list[FakeTensorMode] = []
    forms: list[TreeForm] = []

    @functools.wraps(original)
    def forward(**kwargs: Any) -> Any:
        leaves = pytree.tree_leaves([kwargs[name] for name in form.names])
        modes.extend(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
        for group in dimensions.values():
            shapes = [leaves[index].shape[dimension] for index, dimension in group]
            for size in shapes[1:]:
                torch._check(size == shapes[0])
        drawn = _python_draws()
        try:
            keywords = form.keywords(leaves)
            outputs = original(**keywords)
        except RuntimeError as error:
            raise _Raised(error) from None
        if _python_draws() != drawn:
            raise CaptureError("it draws random numbers from Python or NumPy, which a graph would make constant")
        try:
            flat, outputs_form = taken_apart(outputs, form.passed((), keywords))
        except UnknownCache as error:
            raise CaptureError(str(error)) from None
        forms.append(outputs_form)
        return tuple(flat) if outputs_form.holds_caches else outputs

    # For arguments in a **kwargs parameter, the exporter of torch 2.11 expects shapes under two names.
    if not form.parameters.issuperset(form.names):
        names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in form.names]
        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    try:
        with forward_over(model, forward), shielded():
            yield forms
    finally:
        # A reference cycle between the traced inputs and their shape environment, which Python's garbage collector
        # cannot find, as part of it is in C++: both, with weak references to all weights, would never be freed.
        for mode in modes:
            if mode.shape_env is not None and mode.shape_env.tracked_fakes:
                mode.shape_env.tracked_fakes.clear()


def _dense(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy where it has gaps, like a slice of a larger tensor: the exporter would treat its strides as
    sizes without a matching dimension."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return tensor
    copy = tensor.clone()
    return tensor if copy.stride() == tensor.stride() else copy


def call_form(model: nn.Module, call: ExampleCall) -> CallForm:
    try:
        return CallForm(model.forward, call.args, call.kwargs)
    except ValueError as error:
        raise CaptureError(str(error)) from None


def _is_attribute(model: nn.Module, path: str, name: str) -> bool:
    """Whether a constant is a plain attribute of a module: it may be assigned again, so every call reads it again."""
    try:
        return isinstance(vars(model.get_submodule(path)).get(name), Tensor)
    except AttributeError:
        return False


def _export(model: nn.Module, kwargs: dict[str, Any], dynamic: dict[str, Any]) -> ExportedProgram:
    try:
        with (
            quiet_thread(),
            torch.no_grad(),
            _nothing_kept(),
            KeptContiguous(),
            _NoErrorsCaught(),
            no_compiler_asked_for(),
            lean_graphs(model.forward.__code__),
        ):
            program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic, strict=False)
    except CaptureError:
        raise
    except _Raised as raised:
        raise CaptureError(_export_reason(raised.error)) from raised.error
    except Exception as error:  # the exporter passes on any error of the model's code
        raise CaptureError(_export_reason(error)) from error
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            values = [node.meta.get("val") for node in module.graph.nodes]
            if any(is_transformed(value) for value in values if isinstance(value, Tensor)):
                raise CaptureError("it runs a torch.func transform")
    return program


class _NoErrorsCaught(TorchFunctionMode):
    """Context manager that refuses a forward which catches an operator's error, as another call may not raise it."""

    first: Exception | None = None
    place: str | None = None

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        if error is None and self.first is not None:
            reason = f"its forward catches an operator's error: {_export_reason(self.first)}"
            raise CaptureError(reason, self.place)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            if self.first is None:
                self.first, self.place = error, place_now()
            raise


@contextmanager
def _same_containers(model: nn.Module):
    """Context manager that restores the original lists and dicts among the attributes, which may be shared: the
    exporter leaves copies."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in attributes.items():
                found = vars(module).get(name)
                if found is not value and is_equal(found, value):
                    vars(module)[name] = value


def _python_draws() -> tuple[Any, ...]:
    """The states of the global random generators of Python and NumPy."""
    state: Any = numpy.random.get_state()
    _, keys, position, *_ = state
    return random.getstate(), keys.tobytes(), position


@contextmanager
def _nothing_kept():
    """Context manager that removes the exporter's leftovers: debug records of every node of a trace, and up to torch
    2.11, where the forward raises, a global module hook."""
    notes = getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {})
    kept = (notes, torch_module._global_buffer_registration_hooks)
    before = [dict(store) for store in kept]
    try:
        yield
    finally:
        for store, known in zip(kept, before):
            for key in store.keys() - known.keys():
                del store[key]


def is_final(error: CaptureError) -> bool:
    """Whether the model is refused for all free sizes: its control flow depends on values or on compilers, or
    it returns a cache that the exporter does not support."""
    if isinstance(error, AskedForCompilers):
        return True
    unknown = any(words in str(error.__cause__) for words in ("not a known type", "pytree-flattenable"))
    return isinstance(error.__cause__, GuardOnDataDependentSymNode) or (str(error) == CACHE_IN_OUTPUT and unknown)


def _export_reason(error: Exception) -> str:
    """The first line of an exporter error, with the remedy where it is known."""
    text = str(error)
    if "Cache" in text and "output" in text:
        return CACHE_IN_OUTPUT
    if "__obj_flatten__" in text:
        return "it has packed quantized weights, which torch.export does not support"
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"torch.export: {type(error).__name__}: {line[:200]}"


def _region(
    model: nn.Module,
    program: ExportedProgram,
    form: CallForm,
    free: Mapping[str, Dimensions],
    example: Any,
    reads: frozenset[Read],
    outputs: TreeForm,
) -> Region:
    signature = program.graph_signature
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    slots, constants, inputs, values = {}, {}, [], []
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            path, _, attribute = spec.target.rpartition(".")
            slots[name] = (path, attribute)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            path, _, attribute = spec.target.rpartition(".")
            if _is_attribute(model, path, attribute):
                slots[name] = (path, attribute)
            else:
                constants[name] = program.constants[spec.target]
                if constants[name].layout is not torch.strided:
                    raise CaptureError("it computes with a sparse tensor that none of its modules has as an attribute")
                if constants[name].numel() == 1:
                    placeholders[name].meta["kfconvert_value"] = constants[name].item()  # see constant_value
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
            values.append(placeholders[name].meta.get("val", getattr(spec.arg, "value", None)))
        else:
            raise CaptureError(f"the graph takes a {spec.kind.name.lower()} argument")
    for spec in signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            written = next((node for node in program.graph.nodes if node.name == spec.arg.name), None)
            place = None if written is None else location(written)
            raise CaptureError(f"the forward has a side effect: {spec.kind.name.lower()} {spec.target}", place)
    try:
        guard = guard_from_placeholders(values, free)
    except ValueError as error:
        raise CaptureError(str(error)) from None
    root = program.graph_module
    return Region(program.graph, root, form, guard, inputs, slots, constants, outputs, example, reads)
