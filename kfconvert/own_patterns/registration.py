"""``register_pattern``: checks a user-defined fusion and adds it to the patterns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from ..inputs import ExampleCall, InputError, call_of
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
    """Registers a fusion: conversions search models for the computation of ``reference``, and use ``replacement`` where
    it is as accurate and not slower.

    The pattern is treated like kfconvert's patterns: its sites are measured, validated, reported and explained under
    its name, which ``include`` and ``exclude`` accept. If two patterns match the same calls, the user's has precedence.

    Args:
        reference: a function of tensors (floating-point or integer) and numbers, which returns a floating-point tensor
            or a tuple of them. It is traced and canonicalized like the graph of a model. Its operator calls match for
            tensors of any sizes and any floating-point dtype (a common dtype, if the example has one). Float arguments
            match any numbers (an int if that changes no dtype). Other arguments (bool, int, str,
            None) must equal the example's. For each match, it is traced again with the shapes of the match. Tensors
            with equal shapes in the example must have equal shapes in the match.
        replacement: a function or module with the same arguments, and results with the same shapes, dtypes and device.
            It gets contiguous tensors, must not write to them or return their memory, and must not own tensors. It
            runs only if no gradients are recorded, and needs no backward: gradients and compilers use the
            original, or the reference.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments, with the number of
            dimensions as in models. The replacement is called with them once, on their device.
        name: an identifier that no other pattern has; see ``unregister_pattern``.
        numerics: "reassociated" limits the error of each site, against float64, to slightly more than the original's,
            as for other patterns; "exact" requires values that are bit-for-bit equal to the reference's; a float is a
            relative error (root mean square) that also passes. The outputs of the whole model are always validated.
        when: called with an ``OwnMatch`` for each match; returns whether to fuse it, or the reason why not as text.

    Raises:
        PatternError: an argument is invalid (one line with its name and the reason), or the name is in use.
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
            advice = ": unregister_pattern removes it" if own else ""
            raise PatternError(f"a pattern {name!r} already exists{advice}")
        own_pattern, pattern = made(Source(name, reference, replacement, when, numerics, _call(name, example_inputs)))
        try:
            source: Source = pattern.source
            values = bound(source).values()
            numbers = {key: value for key, value in bound(source).items() if isinstance(value, float)}
            own_pattern.fusion(numbers).try_out([value for value in values if isinstance(value, Tensor)])
        except RuntimeError as error:
            raise PatternError(f"the replacement of {name!r} does not match its reference: {error}") from error
        add(pattern)


def unregister_pattern(name: str) -> None:
    """Unregisters the pattern ``name``. Converted models keep it.

    Raises:
        PatternError: no pattern is registered under this name.
    """
    with one_at_a_time():
        if not remove(name):
            own = [pattern.name for pattern in every_pattern() if pattern.source]
            raise PatternError(f"no pattern is registered as {name!r}; registered are {', '.join(own) or 'none'}")


def made(source: Source) -> tuple[OwnPattern, Pattern]:
    """Creates the pattern of ``source``. Raises PatternError."""
    name, arguments = source.name, bound(source)
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if not tensors:
        raise PatternError(f"the example inputs of {name!r} have no tensor")
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise PatternError(f"the example input {key} of {name!r} is on the meta device, which has no values")
            if value.dtype.is_complex or value.is_floating_point() and value.dtype not in FLOAT_DTYPES:
                raise PatternError(f"the example input {key} of {name!r} has dtype {value.dtype}")
        elif not isinstance(value, (bool, int, float, str, type(None))):
            kinds = "tensors, numbers, bools, strings or None"
            raise PatternError(
                f"the example input {key} of {name!r} is a {type(value).__name__}; arguments are {kinds}"
            )
    replacement = source.replacement
    if isinstance(replacement, nn.Module) and [*replacement.parameters(), *replacement.buffers()]:
        raise PatternError(f"the replacement of {name!r} has tensors: make them arguments")
    own_pattern = OwnPattern(source, arguments)
    try:
        return own_pattern, own_pattern.pattern()
    except PatternError as error:
        raise PatternError(f"the reference of {name!r} cannot be a pattern: {error}") from error


def bound(source: Source) -> dict[str, Any]:
    """Returns the example inputs by parameter names of the reference, in the order of the call. Raises PatternError."""
    try:
        signature = inspect.signature(source.reference)
        given = signature.bind(*source.call.args, **source.call.kwargs).arguments
    except (TypeError, ValueError) as error:
        raise PatternError(f"the example inputs of {source.name!r} do not match its reference: {error}") from None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key in given:
        if signature.parameters[key].kind in several:
            raise PatternError(f"the reference of {source.name!r} takes any number of arguments: name each of them")
    names = list(given)
    return {key: given[key] for key in (*names[: len(source.call.args)], *source.call.kwargs)}


def _call(name: str, example_inputs: Any) -> ExampleCall:
    try:
        return call_of(example_inputs)
    except InputError as error:
        raise PatternError(f"the pattern {name!r}: {error}") from None


def _check_numerics(name: str, numerics: Any) -> None:
    if numerics in ("exact", "reassociated") or isinstance(numerics, float) and 0 <= numerics < math.inf:
        return
    raise PatternError(f"numerics of {name!r} must be 'exact', 'reassociated' or an error as a float, not {numerics!r}")
