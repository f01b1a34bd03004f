"""What is said of an operator beside its function, once, for all who list operators.

From the declarations follow ``ops.__all__``, the families ``kernels.cpu`` and ``kernels.cuda``, the arguments with
which the tests call every operator, the list in docs/operators.md, and the benchmark's and the sanitizer's cases of
those operators that have none of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROUPS = ("elementwise", "norm", "reduction", "attention", "block", "image", "series", "optimizer")


@dataclass(frozen=True)
class Operator:
    """A public function of ``kfconvert.ops``.

    Attributes:
        function: the function itself.
        group: one of GROUPS.
        example: (t, rows, columns) -> positional arguments, ``t(*shape)`` being a float tensor; None where no tensors
            are taken.
        reference: the operator in plain ATen where that stands beside it; those of the others are in
            ``kernels/reference``.
        runs: the operators, ours or PyTorch's, that it calls where it has no kernel of its own; else None.
        why_aten: why this call runs on plain ATen although there is a kernel, with the parameters of ``function``; None
            where every call has a kernel. It returns None for calls that have one.
        timed_as: the operators by which the benchmark times its kernel, where it has no case of its own.
    """

    function: Callable[..., Any]
    group: str
    example: Callable[[Callable[..., Tensor], int, int], tuple] | None
    reference: Callable[..., Any] | None
    runs: str | None
    why_aten: Callable[..., str | None] | None
    timed_as: str | None

    @property
    def is_compiled(self) -> bool:
        """Whether it has kernels of its own, on the CPU and on CUDA."""
        return self.runs is None and self.example is not None

    @property
    def has_no_backward(self) -> bool:
        """Whether calls that want gradients never run its kernel."""
        return self.why_aten is wants_gradients


# name -> operator, in the order in which their modules are imported
OPERATORS: dict[str, Operator] = {}


def declare(
    group: str,
    example: Callable[[Callable[..., Tensor], int, int], tuple] | None = None,
    why_aten: Callable[..., str | None] | None = None,
    timed_as: str | None = None,
    runs: str | None = None,
    reference: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters the function below it into OPERATORS; see :class:`Operator` for the arguments."""
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, not {group!r}")

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[function.__name__] = Operator(function, group, example, reference, runs, why_aten, timed_as)
        return function

    return entered


def wants_gradients(*args: Any, **kwargs: Any) -> str | None:
    """The ``why_aten`` of kernels without a backward."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "the kernel has no backward"
    return None
