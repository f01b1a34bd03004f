"""Kernels that TorchInductor generates for a program, for inputs of one kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .program import Plans, Program
from .split import Call

# New traces after changes of weights take at most so many seconds, and this share of the time since the conversion.
_SECONDS, _SHARE_OF_TIME = 20.0, 0.05


class Ungenerated(Exception):
    """The reason why no kernels could be generated."""


class Generated:
    """A compiled form of a program, for flat inputs of one kind: their shapes, strides, dtypes and numbers.

    TorchInductor compiles the code of the program. Fused modules and library calls stay calls of their kernels; what is
    between them becomes generated kernels. It may also compile ``plain``, the program without fused modules.

    Weights that the code reads, and the tensors of the plans, are inputs of the compiled form; numbers are too, as
    tensors on the device. After a change of weights, the plans have other tensors; a new trace finds them, and must
    have the same code.

    Args:
        plain: the same region without fused modules, to compile instead; None for ``program`` itself.

    Raises:
        Ungenerated: TorchInductor cannot compile the program.
    """

    def __init__(self, program: Program, leaves: list[Any], plain: Program | None = None):
        self._plain = plain
        source = plain or program
        plans = source.plans(leaves)
        self._split = source.split(source.computed(plans, leaves))
        try:
            code, held = self._traced(source, plans, leaves)
            tensors = [*_weights(source, leaves), *filter(_is_on_device, leaves), *held]
            self._compiled = _Compiled(_compile(code, tensors))
        except Exception as error:  # the compiler may raise anything
            raise Ungenerated(f"{type(error).__name__}: {error}".splitlines()[0][:300]) from None
        self._text, self._kinds = code.code, _kinds(held)
        self._begin, self._spent = time.monotonic(), 0.0
        if plain is None:
            plans.held_by_compiled = self, held

    def call(self, program: Program, plans: Plans, leaves: list[Any]) -> Call | None:
        """Return a call of the compiled form, valid as long as ``plans`` and for inputs of its kind. None if the plans
        compute something else now, or if too much time went into traces after changes of weights."""
        compiled, plain = self._compiled.function, self._plain
        if compiled is None:
            return None
        held = [] if plain is not None else self._held(program, plans, leaves)
        if held is None:
            return None
        weights = _weights(plain or program, leaves)

        def run(leaves: list[Any]) -> Sequence[Any]:
            return tuple(compiled(*weights, *filter(_is_on_device, leaves), *held))

        return run if self._split is None else self._split.with_plans(plans, run)

    def _held(self, program: Program, plans: Plans, leaves: list[Any]) -> list[Tensor] | None:
        """The tensors of ``plans`` that the compiled form takes; None as in ``call``."""
        owner, held = plans.held_by_compiled
        if owner is self:
            return held
        start = time.monotonic()
        if self._spent > _SECONDS + _SHARE_OF_TIME * (start - self._begin):
            return None
        code, held = self._traced(program, plans, leaves)
        self._spent += time.monotonic() - start
        if code.code != self._text or _kinds(held) != self._kinds:
            return None
        plans.held_by_compiled = self, held
        return held

    def _traced(self, program: Program, plans: Plans, leaves: list[Any]) -> tuple[fx.GraphModule, list[Tensor]]:
        """Return the graph of the calls in ``program`` or its body, and the tensors of its plans on the device. These
        follow the weights and the tensors of ``leaves`` as inputs of the graph; all other values become part of it."""
        from torch.fx.experimental.proxy_tensor import make_fx

        code, weights = self._split.body if self._split else program.code, program.read_by_code()
        taken = [*map(_is_input, weights), *map(_is_on_device, leaves)]
        given = [*weights, *leaves]

        def run(*tensors: Tensor) -> Sequence[Any]:
            found = iter(tensors)
            values = [next(found) if is_taken else value for value, is_taken in zip(given, taken)]
            return code(plans, *values)

        inputs = [*_weights(program, leaves), *filter(_is_on_device, leaves)]
        with torch.no_grad():
            module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        held = _lift_held_tensors(module)
        return module, held


class _Compiled:
    """A compiled function that copies of a model share and pickles drop."""

    def __init__(self, function: Callable[..., Any] | None = None):
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        return self

    def __reduce__(self):
        return _Compiled, ()


def _weights(program: Program, leaves: list[Any]) -> list[Tensor]:
    """The weights that the code of ``program`` reads, as inputs of a compiled form. Numbers in host memory are copied
    to the device here: TorchInductor would copy them in each call, which cannot be recorded."""
    device = next((leaf.device for leaf in leaves if _is_on_device(leaf)), None)
    taken = [weight for weight in program.read_by_code() if _is_input(weight)]
    return [weight if _is_on_device(weight) else weight.to(device) for weight in taken]


def _is_input(weight: Tensor) -> bool:
    return _is_on_device(weight) or weight.dim() == 0


def _lift_held_tensors(module: fx.GraphModule) -> list[Tensor]:
    """Turns the device tensors that the graph holds into further inputs, and returns them."""
    held: list[Tensor] = []
    inputs: list[fx.Node] = []
    names = set()
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1:]
    for node in list(module.graph.nodes):
        tensor: Any = getattr(module, node.target) if node.op == "get_attr" else None
        if not _is_on_device(tensor):
            continue
        index = next((index for index, known in enumerate(held) if known is tensor), len(held))
        if index == len(held):
            with module.graph.inserting_after(last[0] if last else None):
                last = [module.graph.placeholder(f"held_{index}")]
            last[0].meta = dict(node.meta)
            held.append(tensor)
            inputs.append(last[0])
        node.replace_all_uses_with(inputs[index])
        module.graph.erase_node(node)
        names.add(node.target)
    for name in names:
        delattr(module, name)
    module.recompile()
    return held


def _compile(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    from torch._inductor import standalone_compile

    with torch.no_grad():
        compiled = standalone_compile(module, list[Any](tensors), dynamic_shapes="from_example_inputs")
        compiled(*tensors)  # loads the kernels
    return compiled


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _kinds(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
