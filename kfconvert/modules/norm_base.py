"""Base classes of the fused norms: normalized shape, strategies, and the residual addition before the norm."""

import torch

from ..ops.norms import as_shape
from .base import FusedModule, require_float_tensor


class FusedNorm(FusedModule):
    """Base of the fused norms. A subclass defines ``_kernel`` and ``reference``, which take the norm's inputs."""

    default_activation = "none"
    return_sum = False

    def __init__(self, normalized_shape, eps: float, activation: str | None):
        super().__init__(activation or self.default_activation)
        self.normalized_shape = tuple(as_shape(normalized_shape))
        self.eps = eps

    @classmethod
    def _of_tensors(
        cls, normalized_shape, eps: float, activation: str | None, options: dict, **tensors: torch.Tensor | None
    ):
        """Creates a module that shares ``tensors``, each of normalized_shape or None."""
        module = cls.__new__(cls)
        FusedNorm.__init__(module, normalized_shape, eps, activation)
        module._set_options(**options)
        for name, tensor in tensors.items():
            if tensor is not None:
                require_float_tensor(tensor, name)
                if tuple(tensor.shape) != module.normalized_shape:
                    raise ValueError(f"{name} must have shape {module.normalized_shape}, got {tuple(tensor.shape)}")
        module._set_tensors(**tensors)
        return module

    def _set_options(self) -> None:
        """Sets the options of a subclass."""

    @classmethod
    def examples(cls):
        yield cls(8), (torch.randn(5, 8),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the module's result. x: (..., *normalized_shape); returns the same shape and dtype."""
        return self.reference(x) if self.strategy == "composition" else self._kernel(x)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, {super().extra_repr()}"


class AddsResidual(FusedNorm):
    """A mixin before another FusedNorm, whose arguments it takes: computes the norm of ``x + residual``, with
    ``return_sum`` also the sum."""

    def __init__(self, normalized_shape, *arguments, return_sum: bool = False, **options):
        super().__init__(normalized_shape, *arguments, **options)
        self.return_sum = return_sum

    def _set_options(self, return_sum: bool = False, **options) -> None:
        super()._set_options(**options)
        self.return_sum = return_sum

    @classmethod
    def examples(cls):
        for return_sum in (False, True):
            yield cls(8, activation="silu", return_sum=return_sum), (torch.randn(5, 8), torch.randn(5, 8))

    def forward(self, x: torch.Tensor, residual: torch.Tensor):  # type: ignore[override]  # another argument
        """Computes y. x, residual: (..., *normalized_shape); returns y, or (y, x + residual) with ``return_sum``."""
        if self.strategy == "composition":
            return self.reference(x, residual)
        return self._kernel(x, residual)

    def reference(self, x: torch.Tensor, residual: torch.Tensor):
        total = x + residual
        y = super().reference(total)
        return (y, total) if self.return_sum else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, return_sum={self.return_sum}"
