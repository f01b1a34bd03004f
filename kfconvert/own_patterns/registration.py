"""``register_pattern``: what a user says of a fusion, checked and put among the patterns that are looked for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from ..inputs import ExampleCall
from ..matching import Pattern
from ..modules import FLOAT_DTYPES
from ..patterns import add, every_pattern, remove
from ..process import one_at_a_time
from .errors import PatternError
from .match import OwnMatch
from .pattern import OwnPattern, Source

Numerics = Literal["exact", "reassociated"] | float
_RESERVED = ("total",)  # keys of the statistics


def register_pattern(
    reference: Callable[..., Any],
    replacement: Callable[..., Any],
    example_inputs: Any,
    *,
    name: str,
    numerics: Numerics = "reassociated",
    when: Callable[[OwnMatch], bool | str] | None = None,
) -> None:
    """From now on, look in models for what ``reference`` computes, and let ``replacement`` compute it where that is as
    accurate and faster.

    Such a pattern is treated as those of kfconvert: its sites are measured, validated, reported and explained under its
    name, which ``include`` and ``exclude`` take too. Of two patterns that fit the same calls, one of a user's comes
    first.

    Args:
        reference: a function of tensors, of a floating dtype or integers, and numbers, which returns a tensor of a
            floating dtype or a tuple of some. It is traced, and brought to one spelling as the graph of a model is.
            What is looked for are its calls of operators, with tensors of any sizes and of any floating dtype in the
            place of its tensors (of one dtype, where those of the example have one), and any numbers in the place of
            its arguments that are floats (an int where that changes no dtype); of other arguments (bool, int, str,
            None) those of the example. Where it is found, it is traced again for the shapes that are there. Tensors
            that have one shape in the example have one there, too.
        replacement: a function or module of any kind that takes the same arguments, and returns results of the same
            shapes, dtypes and device. It gets contiguous tensors, writes to none of them, returns none of their memory,
            and holds no tensors of its own. It runs where no gradients are recorded only, and needs none: gradients and
            compilers get the original, or the reference.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments, with as many
            dimensions as in models. The replacement is called with them once, on the device that they are on.
        name: an identifier that no other pattern has; see ``unregister_pattern``.
        numerics: "reassociated" holds the error of each site, against float64, to that of the original or little
            more, as for other patterns; "exact" wants the values of the reference, bit for bit; a float is a relative
            error (root mean square) that passes as well. The outputs of the whole model are validated in any case.
        when: called with an ``OwnMatch`` for each place that fits; returns whether it may be fused there, or in words
            why not.

    Raises:
        PatternError: an argument is of no use (in one line: which and why), or the name is taken.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
        raise PatternError(f"name must be an identifier such as 'softcap', not {name!r}"[:300])
    for what, function in (("reference", reference), ("replacement", replacement), ("when", when)):
        if not callable(function) and not (what == "when" and function is None):
            raise PatternError(f"{what} of {name!r} must be a function, not {function!r}"[:300])
    _check_numerics(name, numerics)
    with one_at_a_time():
        if any(pattern.name == name for pattern in every_pattern()):
            own = any(pattern.name == name and pattern.source for pattern in every_pattern())
            advice = ": unregister_pattern takes it back" if own else ""
            raise PatternError(f"there is a pattern {name!r} already{advice}")
        own_pattern, pattern = made(Source(name, reference, replacement, when, numerics, _call(name, example_inputs)))
        try:
            source: Source = pattern.source
            values = bound(source).values()
            numbers = {key: value for key, value in bound(source).items() if isinstance(value, float)}
            own_pattern.fusion(numbers).try_out([value for value in values if isinstance(value, Tensor)])
        except RuntimeError as error:
            raise PatternError(f"the replacement of {name!r} does not fit: {error}") from error
        add(pattern)


def unregister_pattern(name: str) -> None:
    """Look for the pattern that was registered as ``name`` no longer. Models that were converted keep it.

    Raises:
        PatternError: none is registered under this name.
    """
    with one_at_a_time():
        if not remove(name):
            own = [pattern.name for pattern in every_pattern() if pattern.source]
            raise PatternError(f"no pattern is registered as {name!r}; registered are {', '.join(own) or 'none'}")


def made(source: Source) -> tuple[OwnPattern, Pattern]:
    """The pattern of ``source``. Raises PatternError."""
    name, arguments = source.name, bound(source)
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if not tensors:
        raise PatternError(f"the example inputs of {name!r} hold no tensor")
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise PatternError(f"the example input {key} of {name!r} is on the meta device, without values")
            if value.dtype.is_complex or value.is_floating_point() and value.dtype not in FLOAT_DTYPES:
                raise PatternError(f"the example input {key} of {name!r} has dtype {value.dtype}")
        elif not isinstance(value, (bool, int, float, str, type(None))):
            kinds = "tensors, numbers, bools, strings or None"
            raise PatternError(
                f"the example input {key} of {name!r} is a {type(value).__name__}; arguments are {kinds}"
            )
    replacement = source.replacement
    if isinstance(replacement, nn.Module) and [*replacement.parameters(), *replacement.buffers()]:
        raise PatternError(f"the replacement of {name!r} holds tensors of its own: make them arguments")
    own_pattern = OwnPattern(source, arguments)
    try:
        return own_pattern, own_pattern.pattern()
    except PatternError as error:
        raise PatternError(f"the reference of {name!r} is no pattern: {error}") from error


def bound(source: Source) -> dict[str, Any]:
    """The example inputs by the names of the reference's parameters, in the order of the call. Raises PatternError."""
    try:
        signature = inspect.signature(source.reference)
        given = signature.bind(*source.call.args, **source.call.kwargs).arguments
    except (TypeError, ValueError) as error:
        raise PatternError(f"the example inputs of {source.name!r} do not fit its reference: {error}") from None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key in given:
        if signature.parameters[key].kind in several:
            raise PatternError(f"the reference of {source.name!r} takes any number of arguments: name each of them")
    names = list(given)
    return {key: given[key] for key in (*names[: len(source.call.args)], *source.call.kwargs)}


def _call(name: str, example_inputs: Any) -> ExampleCall:
    if isinstance(example_inputs, Tensor):
        return ExampleCall((example_inputs,))
    if isinstance(example_inputs, dict):
        if not all(isinstance(key, str) for key in example_inputs):
            raise PatternError(f"the example inputs of {name!r} have keys that are no names of arguments")
        return ExampleCall((), dict(example_inputs))
    if isinstance(example_inputs, (tuple, list)):
        return ExampleCall(tuple(example_inputs))
    raise PatternError(
        f"the example inputs of {name!r} must be a tensor, a tuple or a dict, not {example_inputs!r}"[:300]
    )


def _check_numerics(name: str, numerics: Any) -> None:
    if numerics in ("exact", "reassociated") or isinstance(numerics, float) and 0 <= numerics < math.inf:
        return
    raise PatternError(f"numerics of {name!r} must be 'exact', 'reassociated' or an error as a float, not {numerics!r}")
