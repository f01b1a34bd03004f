"""Converts the user's inputs (a shape, tensors, keyword arguments) to an example call of the model."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from .caches import caches_in, is_cache, map_tensors, taken_apart

# Maximum number of elements of a shape. More exceed any memory, so the shape is a mistake.
_MOST_ELEMENTS = 2**48
# Types of arguments that are passed unchanged.
_UNCHANGED = (Tensor, PackedSequence, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class InputError(ValueError):
    """Raised if the user's shape, tensors, dtype or device cannot be an input of this model."""


@dataclass
class ExampleCall:
    """A call of the model, ``model(*args, **kwargs)``, or of its method ``method``."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    method: str | None = None

    def __call__(self, model: Callable[..., Any]) -> Any:
        """Calls ``model`` and returns the outputs. Caches, containers and objects, which a call may change, are copied
        first."""
        values = (*self.args, *self.kwargs.values())
        if caches_in(values):
            call = self.copied()
        elif all(isinstance(value, _UNCHANGED) for value in values):
            call = self
        else:
            call = ExampleCall(*pytree.tree_map(_own, (self.args, self.kwargs), is_leaf=is_whole))
        return self.function(model)(*call.args, **call.kwargs)

    def function(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the called function: ``model`` or its method."""
        return model if self.method is None else getattr(model, self.method)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> ExampleCall:
        """Returns the call with ``fn`` applied to every tensor at any depth, see ``to_each``."""
        args, kwargs = map_tensors(to_each(fn), (self.args, self.kwargs), is_leaf=is_whole)
        return ExampleCall(args, kwargs, self.method)

    def copied(self) -> ExampleCall:
        """Returns the call with copies of its tensors, so that a forward may write to them."""
        return self.map_tensors(copy_of)

    def tensors(self) -> list[Tensor]:
        leaves, _ = taken_apart((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def summary(self) -> str:
        return ", ".join([shown(a) for a in self.args] + [f"{k}={shown(v)}" for k, v in self.kwargs.items()])


def shown(value: Any) -> str:
    """Returns a short text for an argument, with dtype and shape of tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, (Mapping, Sequence)) or is_cache(value) else repr(value)[:80]


def _own(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _UNCHANGED) else deepcopy(leaf)


def is_whole(value: Any) -> bool:
    """Whether a container is treated as a leaf, because its constructor checks its items."""
    return isinstance(value, PackedSequence)


def copy_of(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor, with the same strides if its elements do not overlap."""
    copy = tensor.detach().clone()
    if tensor.layout is not torch.strided or tensor.is_nested or copy.stride() == tensor.stride():
        return copy
    try:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(copy)
    except RuntimeError:
        return copy


def to_each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps ``function`` to run once per distinct object, so a tensor that is passed twice stays one tensor."""
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
    """Returns the example call for ``model``, with tensors on ``device`` and floating-point tensors in ``dtype``.

    Args:
        input_shape: shape of the model's single input, batch first. Token models (with a main input ``input_ids``, or
            an embedding lookup of the first input) receive random integers below the vocabulary size, other models
            standard normal numbers. Encoder-decoders receive the same number of decoder tokens, or two if the main
            input is not a sequence of tokens.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        InputError: neither or both are given, the shape has other values than positive integers, or a tensor has no
            values or no shape.
    """
    if (input_shape is None) == (example_inputs is None):
        raise InputError("pass exactly one of input_shape and example_inputs, or calls as tune_for or example_calls")
    if input_shape is not None:
        call = _call_for_shape(model, _checked_shape(input_shape))
    else:
        call = call_of(example_inputs)

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta and device.type != "meta":
            raise InputError("example_inputs has a tensor on the meta device, which has no values")
        if tensor.is_nested and tensor.layout is torch.strided:
            raise InputError("example_inputs has a nested tensor with the strided layout: use the layout torch.jagged")
        return tensor.to(device, dtype) if dtype and tensor.is_floating_point() else tensor.to(device)

    return call.map_tensors(place)


def holds_tokens(tensor: Tensor) -> bool:
    """Whether ``tensor`` may contain token ids or their mask: shape [batch, length] and not floating-point."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


def is_token_model(model: nn.Module) -> bool:
    """Whether the main input of ``model`` is a tensor of token ids."""
    if getattr(model, "main_input_name", None) is not None:
        return model.main_input_name == "input_ids"
    return "input_ids" in inspect.signature(model.forward).parameters


def token_calls(model: nn.Module, call: ExampleCall) -> list[ExampleCall]:
    """Returns the other usual calls of a token model: with ids, with ids and mask, with all outputs of a tokenizer."""
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
    """Returns ``call`` with at least two examples and two tokens, because a size of 1 looks like broadcasting."""
    if any(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in call.tensors()):
        call = variations(call).get("batch", call)
    return _longer_by_one(call, [tensor for tensor in call.tensors() if _is_sequence(tensor) and tensor.shape[1] == 1])


def variations(call: ExampleCall) -> dict[str, ExampleCall]:
    """Returns copies of ``call`` with one changed size each: one more example, one more token, larger images.

    "sequence" adds a token to all tensors of one length, "sequence_2" to those of the next length. "length_1" and so on
    add a token to one of several tensors, because decoder and encoder may have equal lengths by chance.
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
        # Different amounts, because height and width must not look like one size.
        found["image"] = call.map_tensors(
            lambda tensor: nn.functional.pad(tensor, (0, 64, 0, 32)) if _is_image(tensor, bool(images)) else tensor
        )
    return found


def resized(call: ExampleCall, batch_size: int | None, seq_len: int | None) -> ExampleCall:
    """Returns ``call`` with ``batch_size`` examples and ``seq_len`` tokens per sequence, by truncation or repetition.
    None keeps a size.

    Raises:
        InputError: the tensors have different first sizes, or there are no sequences of one length.
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
        raise InputError(f"its inputs ({call.summary()}) have no {what} that can be changed")
    chosen = set(map(id, tensors))
    return call.map_tensors(lambda x: repeated_to(x, dimension, size).clone() if id(x) in chosen else x)


def repeated_to(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Returns ``tensor`` cut to ``size`` entries in a dimension, or repeated up to them."""
    return torch.cat([tensor] * -(-size // tensor.shape[dimension]), dimension).narrow(dimension, 0, size)


def numbered(name: str, index: int) -> str:
    """Returns ``name`` for index 0, else ``name`` with a number."""
    return f"{name}_{index + 1}" if index else name


def _longer_by_one(call: ExampleCall, sequences: list[Tensor]) -> ExampleCall:
    """Returns ``call`` with one more token in each of ``sequences``."""
    chosen = set(map(id, sequences))
    return call.map_tensors(lambda tensor: _longer(tensor, 1) if id(tensor) in chosen else tensor)


def _longer(tensor: Tensor, dimension: int) -> Tensor:
    if tensor.layout is not torch.strided or tensor.shape[dimension] == 0:
        return tensor
    return torch.cat([tensor, tensor.narrow(dimension, -1, 1)], dimension)


def _is_image_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Tensor) and v.dim() == 3 for v in value)


def _is_sequence(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a sequence dimension: token ids, masks, embeddings or audio."""
    return tensor.dim() in (2, 3) and not (tensor.dim() == 3 and not tensor.is_floating_point())


def _is_image(tensor: Tensor, listed: bool) -> bool:
    return tensor.is_floating_point() and tensor.dim() == (3 if listed else 4)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, Tensor):
        raise InputError("input_shape must be a sequence of integers, not a tensor: pass a tensor as example_inputs")
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except (TypeError, ValueError):
        raise InputError(f"input_shape must be a sequence of integers, not {repr(shape)[:200]}") from None
    if not sizes or any(size < 1 for size in sizes):
        raise InputError(f"input_shape must have positive sizes, batch first, not {sizes}")
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise InputError(f"input_shape has too many elements for any memory: {str(sizes)[:200]}")
    return sizes


def call_of(example_inputs: Any) -> ExampleCall:
    """Returns the call with a tensor, a tuple of positional arguments or a dict of keyword arguments. Raises
    InputError."""
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
    call = ExampleCall((torch.randn(shape, generator=generator, device="cpu"),))
    if _has_decoder(model):
        call.kwargs["decoder_input_ids"] = _random_ids(model, (shape[0], 2), generator)
    return call


def is_encoder_decoder(model: Any) -> bool:
    """Whether ``model`` has a configuration of transformers for an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _has_decoder(model: nn.Module) -> bool:
    """Whether ``model`` is an encoder-decoder that takes decoder tokens, such as T5 and Whisper."""
    return is_encoder_decoder(model) and "decoder_input_ids" in inspect.signature(model.forward).parameters


def _random_ids(model: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None:
        sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        vocabulary = sizes[0] if sizes else 2
    # Ids 0 and 1 are padding in common vocabularies, and some models treat padding differently.
    return torch.randint(min(2, vocabulary - 1), vocabulary, shape, generator=generator, device="cpu")


def _first_leaf_is_embedding(model: nn.Module) -> bool:
    leaves = (m for m in model.modules() if not any(True for _ in m.children()))
    return isinstance(next(leaves, None), (nn.Embedding, nn.EmbeddingBag))
