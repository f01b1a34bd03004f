"""What a user says of the inputs (a shape, tensors, keyword arguments) to one example call of the model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from .caches import caches_in, is_cache, map_tensors, taken_apart

# More than any memory has: a shape with more of them is a slip.
_MOST_ELEMENTS = 2**48
# Arguments that a call gets as they are.
_UNCHANGED = (Tensor, PackedSequence, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class InputError(ValueError):
    """The shape, tensors, dtype or device that the user gave cannot be an input of this model."""


@dataclass
class ExampleCall:
    """One call of the model: ``model(*args, **kwargs)``, or of its method of the name ``method``."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    method: str | None = None

    def __call__(self, model: Callable[..., Any]) -> Any:
        """The outputs; caches, containers and objects among the arguments, which a call may write to, stay as they
        are."""
        values = (*self.args, *self.kwargs.values())
        if caches_in(values):
            call = self.copied()
        elif all(isinstance(value, _UNCHANGED) for value in values):
            call = self
        else:
            call = ExampleCall(*pytree.tree_map(_own, (self.args, self.kwargs), is_leaf=is_whole))
        return self.function(model)(*call.args, **call.kwargs)

    def function(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """What the call calls: ``model`` itself, or its method."""
        return model if self.method is None else getattr(model, self.method)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> ExampleCall:
        """The same call with ``fn`` applied to every tensor, at whatever depth it lies; see ``to_each``."""
        args, kwargs = map_tensors(to_each(fn), (self.args, self.kwargs), is_leaf=is_whole)
        return ExampleCall(args, kwargs, self.method)

    def copied(self) -> ExampleCall:
        """The same call with tensors of its own, into which a forward may write."""
        return self.map_tensors(copy_of)

    def tensors(self) -> list[Tensor]:
        leaves, _ = taken_apart((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def summary(self) -> str:
        return ", ".join([shown(a) for a in self.args] + [f"{k}={shown(v)}" for k, v in self.kwargs.items()])


def shown(value: Any) -> str:
    """An argument in a few words: a tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, (Mapping, Sequence)) or is_cache(value) else repr(value)[:80]


def _own(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _UNCHANGED) else deepcopy(leaf)


def is_whole(value: Any) -> bool:
    """Whether a container is of a kind that is not taken apart: it checks what it is made of."""
    return isinstance(value, PackedSequence)


def copy_of(tensor: Tensor) -> Tensor:
    """Another tensor with the same values, and the same strides where no two elements share a place."""
    copy = tensor.detach().clone()
    if tensor.layout is not torch.strided or tensor.is_nested or copy.stride() == tensor.stride():
        return copy
    try:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(copy)
    except RuntimeError:
        return copy


def to_each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``function``, called once for each distinct object, so that one tensor given twice is still one tensor given
    twice."""
    known: dict[int, tuple[Any, Any]] = {}

    def mapped(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = value, function(value)
        return known[id(value)][1]

    return mapped


def example_call(
    model: nn.Module,
    input_shape: Sequence[int] | None,
    example_inputs: Any,
    device: torch.device,
    dtype: torch.dtype | None,
) -> ExampleCall:
    """The example call for ``model``, its tensors on ``device`` and its floating-point tensors in ``dtype``.

    Args:
        input_shape: shape of the model's single input, batch first. Token models (those whose main input is
            ``input_ids``, or that look their first input up in an embedding) receive random integers below the
            vocabulary size, all others standard normal numbers. Encoder-decoders receive as many integers for their
            decoder, or two where the main input is no sequence of tokens.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        InputError: neither or both are given, the shape is not one of positive integers, or a tensor has no values, or
            no shape.
    """
    if (input_shape is None) == (example_inputs is None):
        raise InputError("give exactly one of input_shape and example_inputs")
    if input_shape is not None:
        call = _call_for_shape(model, _checked_shape(input_shape))
    else:
        call = _call_of(example_inputs)

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta and device.type != "meta":
            raise InputError("example_inputs has a tensor on the device meta, without values")
        if tensor.is_nested and tensor.layout is torch.strided:
            raise InputError("example_inputs has a nested tensor of the strided layout; torch.jagged is the other one")
        return tensor.to(device, dtype) if dtype and tensor.is_floating_point() else tensor.to(device)

    return call.map_tensors(place)


def holds_tokens(tensor: Tensor) -> bool:
    """Whether it may hold token ids, or a mask of them: of shape [batch, length], and not floating-point."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


def is_token_model(model: nn.Module) -> bool:
    """Whether the main input of ``model`` is a tensor of token ids."""
    if getattr(model, "main_input_name", None) is not None:
        return model.main_input_name == "input_ids"
    return "input_ids" in inspect.signature(model.forward).parameters


def token_calls(model: nn.Module, call: ExampleCall) -> list[ExampleCall]:
    """The other ways in which people call a token model: ids alone, with all a tokenizer returns, with the mask."""
    ids = call.kwargs.get("input_ids")
    defaults = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}
    if ids is None or call.args or not set(call.kwargs) <= {"input_ids", *defaults}:
        return []
    parameters = inspect.signature(model.forward).parameters
    forms: list[tuple[str, ...]] = [("input_ids",)]
    if "attention_mask" in parameters:
        forms.append((*forms[-1], "attention_mask"))
        if "token_type_ids" in parameters and getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1:
            forms.insert(1, (*forms[-1], "token_type_ids"))
    return [
        ExampleCall((), {name: call.kwargs[name] if name in call.kwargs else defaults[name](ids) for name in form})
        for form in forms
        if set(form) != set(call.kwargs)
    ]


def widened(call: ExampleCall) -> ExampleCall:
    """``call`` with at least two examples and two tokens: a size of 1 looks like one that is broadcast."""
    if any(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in call.tensors()):
        call = variations(call).get("batch", call)
    return _longer_by_one(call, [tensor for tensor in call.tensors() if _is_sequence(tensor) and tensor.shape[1] == 1])


def variations(call: ExampleCall) -> dict[str, ExampleCall]:
    """``call`` with one size changed: one more example, one more token, larger images; those that it has.

    All tensors of one length get one more token together, as "sequence", then "sequence_2" for the next length. Each of
    several tensors also gets one alone, as "length_1" and so on: a decoder's length may equal its encoder's by chance.
    """
    tensors = call.tensors()
    found = {}
    if images := [value for value in (*call.args, *call.kwargs.values()) if _is_image_list(value)]:
        longer = {id(value): [*value, value[-1]] for value in images}
        found["batch"] = ExampleCall(
            tuple(longer.get(id(value), value) for value in call.args),
            {name: longer.get(id(value), value) for name, value in call.kwargs.items()},
            call.method,
        )
    elif len({tensor.shape[0] for tensor in tensors if tensor.dim() > 0}) == 1:
        found["batch"] = call.map_tensors(lambda tensor: _longer(tensor, 0) if tensor.dim() > 0 else tensor)
    sequences = [tensor for tensor in tensors if _is_sequence(tensor)]
    for number, length in enumerate(dict.fromkeys(tensor.shape[1] for tensor in sequences)):
        alike = [tensor for tensor in sequences if tensor.shape[1] == length]
        found[numbered("sequence", number)] = _longer_by_one(call, alike)
        for tensor in alike if len(alike) > 1 else ():
            found[f"length_{len(found)}"] = _longer_by_one(call, [tensor])
    if any(_is_image(tensor, bool(images)) for tensor in tensors):
        # By different amounts: height and width must not look like one size.
        found["image"] = call.map_tensors(
            lambda tensor: nn.functional.pad(tensor, (0, 64, 0, 32)) if _is_image(tensor, bool(images)) else tensor
        )
    return found


def resized(call: ExampleCall, batch_size: int | None, seq_len: int | None) -> ExampleCall:
    """``call`` with so many examples, and so many tokens in each of its sequences: the last ones are left out, or all
    come again. None keeps what is there.

    Raises:
        InputError: its tensors have no first size in common, or it has no sequences, all of one length.
    """
    if batch_size is not None:
        listed = any(_is_image_list(value) for value in (*call.args, *call.kwargs.values()))
        rows = [tensor for tensor in call.tensors() if tensor.dim() > 0 and not listed]
        call = _with_size(call, 0, batch_size, rows, "batch size")
    if seq_len is not None:
        sequences = [tensor for tensor in call.tensors() if _is_sequence(tensor)]
        call = _with_size(call, 1, seq_len, sequences, "sequence length")
    return call


def _with_size(call: ExampleCall, dimension: int, size: int, tensors: list[Tensor], what: str) -> ExampleCall:
    sizes = {tensor.shape[dimension] for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(f"its inputs ({call.summary()}) have no {what} that could be chosen")
    (present,), chosen = sizes, set(map(id, tensors))

    def sized(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen:
            return tensor
        again = torch.cat([tensor] * -(-size // present), dimension)
        return again.narrow(dimension, 0, size).clone()

    return call.map_tensors(sized)


def numbered(name: str, index: int) -> str:
    """``name`` for the first, which has the index 0, then ``name`` with a number."""
    return f"{name}_{index + 1}" if index else name


def _longer_by_one(call: ExampleCall, sequences: list[Tensor]) -> ExampleCall:
    """``call`` with one more token in each of these tensors of its own."""
    chosen = set(map(id, sequences))
    return call.map_tensors(lambda tensor: _longer(tensor, 1) if id(tensor) in chosen else tensor)


def _longer(tensor: Tensor, dimension: int) -> Tensor:
    if tensor.layout is not torch.strided or tensor.shape[dimension] == 0:
        return tensor
    return torch.cat([tensor, tensor.narrow(dimension, -1, 1)], dimension)


def _is_image_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Tensor) and v.dim() == 3 for v in value)


def _is_sequence(tensor: Tensor) -> bool:
    """Token ids and masks, embeddings, audio."""
    return tensor.dim() in (2, 3) and not (tensor.dim() == 3 and not tensor.is_floating_point())


def _is_image(tensor: Tensor, listed: bool) -> bool:
    return tensor.is_floating_point() and tensor.dim() == (3 if listed else 4)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, Tensor):
        raise InputError("input_shape must be a sequence of integers, not a tensor: give that as example_inputs")
    try:
        sizes = tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        raise InputError(f"input_shape must be a sequence of integers, not {repr(shape)[:200]}") from None
    if not sizes or any(size < 1 for size in sizes):
        raise InputError(f"input_shape must hold positive sizes, batch first, not {sizes}")
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise InputError(f"input_shape has more elements than any memory: {str(sizes)[:200]}")
    return sizes


def _call_of(example_inputs: Any) -> ExampleCall:
    if isinstance(example_inputs, Tensor):
        return ExampleCall((example_inputs,))
    if isinstance(example_inputs, Mapping):
        return ExampleCall((), dict(example_inputs))
    if isinstance(example_inputs, (tuple, list)):
        return ExampleCall(tuple(example_inputs))
    raise InputError(
        f"example_inputs must be a tensor, a tuple of arguments or a dict of keyword arguments, "
        f"not {type(example_inputs).__name__}"
    )


def _call_for_shape(model: nn.Module, shape: tuple[int, ...]) -> ExampleCall:
    generator = torch.Generator().manual_seed(0)
    if is_token_model(model):
        decoded = {"decoder_input_ids": _random_ids(model, shape, generator)} if _has_decoder(model) else {}
        return ExampleCall((), {"input_ids": _random_ids(model, shape, generator), **decoded})
    if _first_leaf_is_embedding(model):
        return ExampleCall((_random_ids(model, shape, generator),))
    call = ExampleCall((torch.randn(shape, generator=generator),))
    if _has_decoder(model):
        call.kwargs["decoder_input_ids"] = _random_ids(model, (shape[0], 2), generator)
    return call


def _has_decoder(model: nn.Module) -> bool:
    """Whether ``model`` is an encoder-decoder that is called with the tokens of its decoder, as T5 and Whisper are."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters


def _random_ids(model: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None:
        sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        vocabulary = sizes[0] if sizes else 2
    # Ids 0 and 1 are padding in the common vocabularies; some models treat padding apart.
    return torch.randint(min(2, vocabulary - 1), vocabulary, shape, generator=generator)


def _first_leaf_is_embedding(model: nn.Module) -> bool:
    leaves = (m for m in model.modules() if not any(True for _ in m.children()))
    return isinstance(next(leaves, None), (nn.Embedding, nn.EmbeddingBag))
