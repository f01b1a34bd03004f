"""The common operators of layer_norm_act and rms_norm_act: a norm of the rows of ``s = x + residual``.

    xhat = (s - mean(s)) rstd if the norm is centered, else s rstd
    v = xhat w + b with w = weight + offset; y = act(v)

Backward, with g = grad * act'(v):
    grad_s = rstd (g w - mean(g w) - xhat mean(g w xhat)) + grad of the returned sum    (of both x and residual;
    mean(g w) is 0 without centering); grad_weight = sum over rows of g xhat; grad_bias = sum over rows of g
v is recomputed from s. Only s and the statistics of each row are saved.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..activations import BY_CODE
from ..double_backward import differentiable_gradients, is_differentiated
from ..norms import accumulator, autocast_norm, check_norm, grad_of_residual, row_count
from ..registration import autocast, define, define_with_twin, differentiate, differentiate_by_decomposition


class NormOperators:
    """Registers ``name``, ``add_<name>`` (also returns the sum), the training form and the backward.

    All take (x, residual, shape, *affine, eps, activation, negative_slope, *more).

    Args:
        name: name of the operator.
        normalise: (s, shape, *affine, eps, *more) -> the normalized rows of s, without the activation, in s's dtype.
        affine: names of the tensors: ("weight",) or ("weight", "bias").
        centred: whether to subtract the mean. The statistics of a row are then (mean, rstd), else (rstd,).
        more: names of further numbers. "offset" is added to the weight.
    """

    def __init__(
        self,
        name: str,
        normalise: Callable[..., Tensor],
        affine: tuple[str, ...],
        centred: bool,
        more: tuple[str, ...] = (),
    ):
        self._name, self._normalise, self._centred = name, normalise, centred
        self._count, self._more = len(affine), more
        tensors = "".join(f"Tensor? {each}, " for each in affine)
        numbers = "".join(f", float {each}" for each in more)
        rest = f"SymInt[] normalized_shape, {tensors}float eps, int activation, float negative_slope{numbers}"
        statistics = ("mean", "rstd") if centred else ("rstd",)
        self._statistics = len(statistics)
        operator, self.inference = define_with_twin(
            f"{name}(Tensor x, Tensor? residual, {rest}) -> Tensor", self._compose, self._fake
        )
        add_operator, self.add_inference = define_with_twin(
            f"add_{name}(Tensor x, Tensor residual, {rest}) -> (Tensor, Tensor)", self._compose_add, self._fake_add
        )
        training = define(
            f"{name}_training(Tensor x, Tensor? residual, {rest}) -> ({_tensors(2 + self._statistics)})",
            self._compose_training,
            self._fake_training,
        )
        kept = "".join(f"Tensor {each}, " for each in statistics)
        self._backward = define(
            f"{name}_backward(Tensor grad, Tensor? grad_sum, Tensor s, {kept}{tensors}SymInt cols, int activation, "
            f"float negative_slope{numbers}) -> ({_tensors(1 + self._count)})",
            self._compose_backward,
            self._fake_backward,
        )
        differentiable = differentiate(training, self._differentiate, self._save)
        self.differentiable = differentiate_by_decomposition(operator, lambda *args: differentiable(*args)[0])
        self.add_differentiable = differentiate_by_decomposition(add_operator, lambda *args: differentiable(*args)[:2])
        autocast((operator, self.inference, add_operator, self.add_inference), autocast_norm)

    def _split(self, args):
        """Splits the arguments after x and residual: (shape, affine, eps, code, negative_slope, more)."""
        shape, affine, (eps, code, negative_slope, *more) = args[0], args[1 : 1 + self._count], args[1 + self._count :]
        return shape, affine, eps, code, negative_slope, more

    def _compose(self, x, residual, *args):
        return self._compose_add(x, residual, *args)[0]

    def _compose_add(self, x, residual, *args):
        shape, affine, eps, code, negative_slope, more = self._split(args)
        check_norm(self._name, x, residual, shape, *affine)
        s = (x if residual is None else x + residual).contiguous()
        return BY_CODE[code].reference(self._normalise(s, shape, *affine, eps, *more), negative_slope), s

    def _fake(self, x, residual, *args):
        shape, affine, *_ = self._split(args)
        check_norm(self._name, x, residual, shape, *affine)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def _fake_add(self, x, residual, *args):
        return tuple(self._fake(x, residual, *args) for _ in range(2))

    def _compose_training(self, x, residual, *args):
        y, s = self._compose_add(x, residual, *args)
        shape, _, eps, *_ = self._split(args)
        wide = s.to(accumulator(s.dtype)).flatten(-len(shape))
        mean = (wide.mean(-1),) if self._centred else ()
        square = wide.var(-1, correction=0) if self._centred else wide.square().mean(-1)
        statistics = (*mean, (square + eps).rsqrt())
        return y, s.new_empty(0) if residual is None else s, *(each.flatten() for each in statistics)

    def _fake_training(self, x, residual, *args):
        y = self._fake(x, residual, *args)
        rows = row_count(x, args[0])
        statistics = [x.new_empty(rows, dtype=accumulator(x.dtype)) for _ in range(self._statistics)]
        return y, x.new_empty(0) if residual is None else torch.empty_like(y), *statistics

    def _compose_backward(self, grad, grad_sum, s, *args):
        statistics, affine, (cols, code, negative_slope, *more) = self._split_backward(args)
        wide = accumulator(s.dtype)
        *mean, rstd = (each.unsqueeze(-1) for each in statistics)
        rows = s.reshape(-1, cols).to(wide)
        xhat = (rows - mean[0] if mean else rows) * rstd
        weight, bias = (*affine, None)[:2]
        if weight is None:
            w = torch.ones(cols, dtype=wide, device=s.device)
        else:
            w = weight.reshape(-1).to(wide) + dict(zip(self._more, more)).get("offset", 0.0)
        activation = BY_CODE[code]
        v = xhat * w if bias is None else xhat * w + bias.reshape(-1).to(wide)
        saved = activation.reference(v, negative_slope) if activation.saves_output else v
        g = activation.backward(grad.reshape(-1, cols).to(wide), saved, negative_slope)
        gw = g * w
        shift = gw.mean(-1, keepdim=True) if self._centred else 0
        grad_s = rstd * (gw - shift - xhat * (gw * xhat).mean(-1, keepdim=True))
        if grad_sum is not None:
            grad_s = grad_s + grad_sum.reshape(-1, cols)
        of_affine = [
            s.new_empty(0) if given is None else summed.sum(0).to(given.dtype)
            for given, summed in zip(affine, (g * xhat, g))
        ]
        return grad_s.to(s.dtype).reshape(s.shape), *of_affine

    def _fake_backward(self, grad, grad_sum, s, *args):
        _, affine, (cols, *_) = self._split_backward(args)
        of_affine = [s.new_empty(0) if given is None else given.new_empty(cols) for given in affine]
        return torch.empty_like(s, memory_format=torch.contiguous_format), *of_affine

    def _split_backward(self, args):
        """Splits the arguments after s: (statistics, affine, numbers)."""
        end = self._statistics + self._count
        return args[: self._statistics], args[self._statistics : end], args[end:]

    def _save(self, ctx, inputs, output):
        x, residual, *args = inputs
        shape, affine, ctx.eps, ctx.code, ctx.negative_slope, ctx.more = self._split(args)
        _, s, *statistics = output
        ctx.shape = tuple(shape)
        ctx.residual_shape = None if residual is None else residual.shape
        needs_sum = x.requires_grad or (residual is not None and residual.requires_grad)
        ctx.mark_non_differentiable(*(statistics if needs_sum else (s, *statistics)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else s, *statistics, *affine)

    def _differentiate(self, ctx, grad, grad_sum, *_):
        s, *kept = ctx.saved_tensors
        affine, numbers = kept[self._statistics :], [None] * (3 + len(ctx.more))
        cols = math.prod(ctx.shape)
        if ctx.residual_shape is None:
            grad_sum = None
        if grad is None:  # only the sum was used
            none = [None] * (1 + self._count)
            return grad_sum, grad_of_residual(grad_sum, ctx.residual_shape), *none, *numbers
        if is_differentiated():
            grad_s, *of_affine = self._differentiable_backward(ctx, grad, grad_sum, s, affine)
        else:
            last = ctx.code, ctx.negative_slope, *ctx.more
            grad_s, *of_affine = self._backward(grad, grad_sum, s, *kept, cols, *last)
            of_affine = [None if given is None else found.reshape(ctx.shape) for given, found in zip(affine, of_affine)]
        return grad_s, grad_of_residual(grad_s, ctx.residual_shape), None, *of_affine, *numbers

    def _differentiable_backward(self, ctx, grad, grad_sum, s, affine):
        """Returns the gradients of s and of the affine tensors."""

        def in_aten(s, *affine):
            return self._compose(s, None, ctx.shape, *affine, ctx.eps, ctx.code, ctx.negative_slope, *ctx.more)

        grad_s, *of_affine = differentiable_gradients(in_aten, (s, *affine), grad)
        return grad_s if grad_sum is None else grad_s + grad_sum, *of_affine


def _tensors(count):
    return ", ".join(["Tensor"] * count)
