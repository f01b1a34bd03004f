"""Reasons for a program not to serve a call: its tensors have changed in kind, or an operator raises an error."""

from __future__ import annotations

from ...region import Region

# What operators raise. Other errors come from outside of the program, such as the handler of a signal for a timeout.
_OF_OPERATORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError)


class Fallback(RuntimeError):
    """A call must run the original forward; the message is the reason."""


class UnfitTensors(Fallback):
    """A tensor of the model does not have the properties that a program was made for; the message names them."""


def leave_to_original(error: Exception, region: Region) -> None:
    """Raises Fallback where an operator in the program of ``region`` has raised ``error`` and the call can be undone:
    the original forward may catch the error, or report it differently."""
    if isinstance(error, Fallback):
        return
    # A step on a static cache may have written part of it, a batch norm its statistics.
    if region.takes_static_cache or region.counts_statistics or not isinstance(error, _OF_OPERATORS):
        return
    text = str(error)
    # An assertion in the graph about data-dependent sizes.
    if isinstance(error, RuntimeError) and "Runtime assertion failed" in text:
        raise Fallback("data-dependent sizes differ from the example's") from error
    raise Fallback(f"its program raised {type(error).__name__}: {text.partition(chr(10))[0][:100]}") from error
