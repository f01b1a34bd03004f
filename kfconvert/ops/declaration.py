"""The operator registry: metadata of each operator, the single source for docs, tests, benchmarks and kernel families.

``ops.__all__``, the families ``kernels.cpu`` and ``kernels.cuda``, the example arguments of tests, the list in
docs/operators.md, and default cases of the benchmark and the sanitizer are derived from the declarations.
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
        example: (t, rows, columns) -> positional arguments, where ``t(*shape)`` is a float tensor; None for operators
            without tensor arguments.
        runs: the operators, of this package or PyTorch, that an operator without a kernel calls; else None.
        why_aten: a function with the parameters of ``function`` that returns why a call runs on plain ATen, or None if
            it runs a kernel; None if every call runs a kernel.
        timed_as: the operators whose benchmark measures the same kernel, if it has no separate case.
    """

    function: Callable[..., Any]
    group: str
    example: Callable[[Callable[..., Tensor], int, int], tuple] | None
    runs: str | None
    why_aten: Callable[..., str | None] | None
    timed_as: str | None

    @property
    def is_compiled(self) -> bool:
        """Whether the operator has compiled kernels for CPU and CUDA."""
        return self.runs is None and self.example is not None


# name -> operator, in import order of their modules
OPERATORS: dict[str, Operator] = {}


def declare(
    group: str,
    example: Callable[[Callable[..., Tensor], int, int], tuple] | None = None,
    why_aten: Callable[..., str | None] | None = None,
    timed_as: str | None = None,
    runs: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the function to OPERATORS. See :class:`Operator` for the arguments."""
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, not {group!r}")

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[function.__name__] = Operator(function, group, example, runs, why_aten, timed_as)
        return function

    return entered


def wants_gradients(*args: Any, **kwargs: Any) -> str | None:
    """Returns the ``why_aten`` of kernels without a backward."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "the kernel has no backward"
    return None
