"""Random small models: descriptions that print as code, the modules built from them, and a strategy that draws them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor, nn

from .random_operations import DTYPES, OPERATIONS, cast

# Sizes after the batch. Ids are int64, all others floating point.
KINDS = {"rows": (6,), "sequence": (5, 6), "signal": (4, 7), "image": (4, 6, 6), "ids": (5,)}
LAYOUTS = ("plain", "strided", "transposed", "channels_last", "expanded")
BATCH = 3


class _Terse:
    """Prints the fields that are not at their default."""

    def __repr__(self) -> str:
        default = type(self)(getattr(self, fields(self)[0].name))
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self)[1:])
        changed = [f"{name}={value!r}" for name, value in pairs if value != getattr(default, name)]
        return f"{type(self).__name__}({', '.join([repr(getattr(self, fields(self)[0].name)), *changed])})"


@dataclass(frozen=True, repr=False)
class Input(_Terse):
    kind: str = "rows"
    layout: str = "plain"


@dataclass(frozen=True, repr=False)
class Step(_Terse):
    """One value: an operation on earlier values. Values are counted from the inputs on.

    Besides those of ``random_operations`` there are "cast" (``dtype``) and "block": ``steps`` as a submodule, that
    many ``times`` one after the other, each with weights of its own or all ``shared``. ``like`` is an earlier step
    whose module is called again, or whose weight is used (``tied``).
    """

    operation: str
    sources: tuple[int, ...] = (0,)
    options: dict[str, Any] = field(default_factory=dict)
    like: int | None = None
    tied: bool = False


@dataclass(frozen=True, repr=False)
class Description(_Terse):
    """A model and its example call.

    ``packed`` tells how the inputs come ("arguments", "list", "dict", or "optional": the last one is left out of
    the example call), ``form`` how the ``outputs``, places of values, are returned.
    """

    inputs: tuple[Input, ...] = (Input(),)
    steps: tuple[Step, ...] = ()
    outputs: tuple[int, ...] = (-1,)
    packed: str = "arguments"
    form: str = "tuple"
    dtype: str = "float32"


@contextmanager
def _numbers_in_float64() -> Iterator[None]:
    """Within the block, integers times a real number are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Chain(nn.Module):
    """Runs steps one after the other. ``exact``: what would have other floating-point dtypes has float64."""

    def __init__(self, exact: bool):
        super().__init__()
        self.exact = exact
        self.steps: list[Step] = []
        self.layers = nn.ModuleDict()

    def grow(self, step: Step, values: list[Any]) -> Tensor:
        """The next value; the step, and its module made to fit the values, are kept."""
        number, tensors = str(len(self.steps)), [values[source] for source in step.sources]
        layer = self._layer(step, tensors)
        if layer is not None:
            self.layers[number] = layer
        value = self._run(step, self.layers[number] if number in self.layers else None, tensors)
        self.steps.append(step)
        return value

    def _layer(self, step: Step, tensors: list[Tensor]) -> nn.Module | None:
        if step.like is not None and not step.tied:
            return self.layers[str(step.like)]
        if step.operation == "block":
            return self._block(tensors[0], **step.options)
        make = OPERATIONS[step.operation].layer if step.operation in OPERATIONS else None
        layer = make(tensors, **step.options) if make else None
        if self.exact and layer is not None:
            layer.double()  # an embedding does not see the dtype from its input
        if step.tied:
            weight = self.layers[str(step.like)].weight
            if weight.shape != layer.weight.shape or weight.dtype is not layer.weight.dtype:
                raise ValueError("weights of other shapes cannot be tied")
            layer.weight = weight
        return layer

    def _block(self, x: Tensor, steps: tuple[Step, ...], times: int, shared: bool) -> nn.ModuleList:
        chains = nn.ModuleList()
        for _ in range(times):
            if chains and shared:
                chains.append(chains[0])
                x = chains[0](x)
                continue
            chain, values = Chain(self.exact), [x]
            for step in steps:
                values.append(chain.grow(step, values))
            chains.append(chain)
            x = values[-1]
        return chains

    def _run(self, step: Step, layer: nn.Module | None, tensors: list[Tensor]) -> Tensor:
        if step.operation == "cast":
            return cast(tensors[0], step.options["dtype"], self.exact)
        if step.operation == "block":
            x = tensors[0]
            for chain in layer:
                x = chain(x)
            return x
        with _numbers_in_float64() if self.exact else nullcontext():
            return OPERATIONS[step.operation].run(layer, tensors, **step.options)

    def values(self, inputs: list[Any]) -> list[Any]:
        values = list(inputs)
        for number, step in enumerate(self.steps):
            layer = self.layers[str(number)] if str(number) in self.layers else None
            values.append(self._run(step, layer, [values[source] for source in step.sources]))
        return values

    def forward(self, x: Tensor) -> Tensor:
        return self.values([x])[-1]


class RandomModel(nn.Module):
    """The root of a random model; a missing second argument is made from the first."""

    def __init__(self, description: Description, exact: bool):
        super().__init__()
        self.description = description
        self.chain = Chain(exact)

    def forward(self, first: Any, second: Tensor | None = None) -> Any:
        packed = self.description.packed
        if packed == "list":
            inputs = list(first)
        elif packed == "dict":
            inputs = [first[name] for name in sorted(first)]
        else:
            inputs = [first] if len(self.description.inputs) == 1 else [first, second]
        if packed == "optional" and second is None:
            inputs[1] = first * 2
        return self._returned(self.chain.values(inputs))

    def _returned(self, values: list[Any]) -> Any:
        outputs, form = [values[place] for place in self.description.outputs], self.description.form
        if form == "dict":
            return {f"value{index}": value for index, value in enumerate(outputs)}
        if form == "nested":
            return {"outputs": [outputs[:1], tuple(outputs)], "none": None, "size": 3}
        if form == "list":
            return outputs
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


def build(description: Description, exact: bool = False) -> RandomModel:
    """The module of a description, with the same weights each time; ``exact``: its float64 twin."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RandomModel(description, exact)
        values = example_values(description, exact)
        # Forwards may write into statistics and inputs: the layers are made in eval mode, on inputs of their own.
        with torch.no_grad():
            model.eval()
            for step in description.steps:
                values.append(model.chain.grow(step, values))
                model.chain.eval()
    return model


def model_inputs(description: Description, batch: int = BATCH, seed: int = 0, exact: bool = False) -> list[Tensor]:
    """One tensor for each input, in the layout that the description asks for."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if exact else DTYPES[description.dtype]
    tensors = []
    for each in description.inputs:
        shape = (batch, *KINDS[each.kind])
        if each.kind == "ids":
            x = torch.randint(0, 32, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator).to(dtype)
        tensors.append(laid_out(x, each.layout))
    return tensors


def example_values(description: Description, exact: bool = False) -> list[Tensor]:
    """What the steps begin with in the example call."""
    values = model_inputs(description, exact=exact)
    return [values[0], values[0] * 2] if description.packed == "optional" else values


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A tensor with the values of ``x`` (for "expanded": its first row's) in another layout."""
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "expanded":
        return x[:1].clone().expand(x.shape)
    return x


def call_arguments(description: Description, tensors: list[Tensor], full: bool = False) -> tuple[Any, ...]:
    """The positional arguments of a call; ``full``: the optional one, too."""
    if description.packed == "list":
        return (list(tensors),)
    if description.packed == "dict":
        return ({f"input{index}": tensor for index, tensor in enumerate(tensors)},)
    return tuple(tensors[:1]) if description.packed == "optional" and not full else tuple(tensors)


# The strategy

_MOST_STEPS = 10
_MOST_ELEMENTS = 4096
# What patterns are made of comes more often than what only stands in their way.
_WEIGHTS = {"linear": 5, "conv1d": 5, "conv2d": 7, "batch_norm": 5, "layer_norm": 4, "activation": 5, "activation_": 3}
_MOTIFS = (
    *[("",)] * 8, ("conv2d", "batch_norm", "activation"), ("conv2d", "batch_norm", "activation_"),
    ("conv2d", "batch_norm", "binary", "activation_"), ("conv1d", "batch_norm", "activation"), ("linear", "activation"),
    ("square_linear", "binary", "layer_norm"), ("binary", "layer_norm", "activation"), ("view", "number_"),
    ("view", "binary_"),
)  # fmt: skip
_WEIGHTS |= {"square_linear": 2, "transposed_linear": 2, "binary": 4, "embedding": 8, "view": 2, "number_": 2}


def _shares_storage(x: Tensor, others: list[Tensor]) -> bool:
    return any(x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


@st.composite
def descriptions(draw) -> Description:
    """Models that run on their example inputs in eval mode."""
    packed = draw(st.sampled_from(["arguments", "arguments", "optional", "list", "dict"]))
    kind = draw(st.sampled_from(list(KINDS)))
    first = Input(kind, draw(st.sampled_from(("plain", "plain", *LAYOUTS))))
    inputs = (first,)
    if packed == "optional":
        inputs = (first, Input(kind))
    elif draw(st.integers(0, 3)) == 3:
        inputs = (first, Input(draw(st.sampled_from([kind, *KINDS])), draw(st.sampled_from(LAYOUTS))))
    dtype = draw(st.sampled_from(["float32", "float32", "float32", *DTYPES]))
    start = Description(inputs, packed=packed, dtype=dtype)
    writes_inputs = draw(st.integers(0, 9)) == 9
    values = example_values(start)
    kept = [] if writes_inputs else list(values)
    with torch.random.fork_rng(), torch.no_grad():
        steps = _draw_steps(draw, Chain(False).eval(), values, kept, _MOST_STEPS)
    count = len(values)
    others = draw(st.lists(st.integers(0, count - 1), max_size=2))
    form = draw(st.sampled_from(["tuple", "list", "dict", "nested"]))
    description = Description(inputs, tuple(steps), (count - 1, *others), packed, form, dtype)
    try:
        build(description, exact=True)
    except RuntimeError:  # it writes into what a cast has copied, and in float64 has not
        reject()
    return description


def _draw_steps(
    draw, chain: Chain, values: list[Tensor], kept: list[Tensor], most: int, nested: bool = False
) -> list[Step]:
    """Grow ``chain`` by up to ``most`` steps that run; nothing writes into the storage of ``kept`` tensors."""
    steps: list[Step] = []
    motif: list[str] = []
    for _ in range(draw(st.integers(1, most))):
        motif = motif or list(draw(st.sampled_from(_MOTIFS)))
        step = _draw_step(draw, chain, values, kept, nested, motif.pop(0))
        versions = [value._version for value in kept]
        copies = [value.clone() for value in values]
        try:
            value = chain.grow(step, values)
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError):
            value = None  # shapes, dtypes or layouts that do not fit: a step less
        chain.eval()
        usable = isinstance(value, Tensor) and 0 < value.numel() <= _MOST_ELEMENTS and value.dim() < 6
        if usable and value.is_floating_point():
            usable = bool(value.isfinite().all()) and value.abs().max().item() < 1e4
        if usable and [value._version for value in kept] == versions:
            steps.append(step)
            values.append(value)
            continue
        del chain.steps[len(steps) :]
        if str(len(steps)) in chain.layers:
            del chain.layers[str(len(steps))]
        for value, copy in zip(values, copies):
            if not torch.equal(value, copy):
                value.copy_(copy)
    return steps


def _draw_step(draw, chain: Chain, values: list[Tensor], kept: list[Tensor], nested: bool, wanted: str) -> Step:
    """One more step: ``wanted`` on the latest value where that is possible, else any operation."""

    def source() -> int:
        return len(values) - 1 - draw(st.sampled_from([0, 0, 0, *range(len(values))]))

    first = len(values) - 1 if wanted else source()
    x = values[first]
    protected = _shares_storage(x, kept)
    names = [n for n, op in OPERATIONS.items() if op.applies(x) and not (op.writes and protected)]
    weighted = [name for name in names for _ in range(_WEIGHTS.get(name, 1))] + ["cast"]
    if wanted in names:
        weighted = [wanted]
    name = draw(st.sampled_from(weighted if nested or wanted in names else [*weighted, "block"]))
    if name == "cast":
        return Step("cast", (first,), {"dtype": draw(st.sampled_from(list(DTYPES)))})
    if name == "block":
        times, shared = draw(st.sampled_from([(1, False), (2, False), (2, True)]))
        inner, fork = Chain(False).eval(), [x.clone()]
        steps = _draw_steps(draw, inner, fork, [], 4, nested=True)
        return Step("block", (first,), {"steps": tuple(steps), "times": times, "shared": shared})
    operation = OPERATIONS[name]
    sources = (first, *(source() for _ in range(operation.arity - 1)))
    options = {key: draw(strategy) for key, strategy in operation.options.items()}
    earlier = [i for i, step in enumerate(chain.steps) if step.operation == name and operation.layer is not None]
    like, tied = None, False
    if earlier and draw(st.booleans()):
        like = draw(st.sampled_from(earlier))
        tied = name in ("linear", "square_linear") and draw(st.booleans())
        options = options if tied else chain.steps[like].options
    return Step(name, sources, options, like, tied)
