"""dropout_act: ``dropout(act(x + bias)) + residual`` in one pass over memory, without a mask.

The index of an element in memory, a seed and a sequence determine whether it is dropped (Philox 4x32-7: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011). Seed and sequence come from torch's generator of the device, so
`torch.manual_seed` makes them reproducible. On a GPU they are the generator's seed and offset, which advances. If a
CUDA graph, torch.compile or another tracer records the call, they are drawn into a tensor on the device, and each
replay draws new values.

Backward: dropout(grad) * act'(x + bias) is the gradient of x and, summed over all other dimensions, of bias. The
gradient of residual is grad.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...torch_state import being_traced
from ..activations import BY_CODE, CODES
from ..arguments import require_share
from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..fused.bias_act import check_terms, spread, sum_by_channel
from ..registration import (
    autocast,
    cast_to_widest,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require,
    wants_gradient,
)

__all__ = ["bias_dropout_add", "gelu_dropout"]


def _drops_all(x, p=0.5, training=True):
    return "the kernel takes p below 1" if training and p == 1 else None


@declare(group="elementwise", example=lambda t, rows, columns: (t(rows, columns),), why_aten=_drops_all)
def gelu_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Computes ``dropout(gelu(x), p)`` with the exact (erf) GELU; see :func:`bias_dropout_add` for the arguments."""
    return _dropout_act(x, None, None, p, training, CODES["gelu"], -1)


@declare(
    group="elementwise",
    example=lambda t, rows, columns: (t(rows, columns), t(columns), t(rows, columns)),
    why_aten=lambda x, bias, residual, p=0.5, training=True, dim=-1: _drops_all(x, p, training),
)
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.5, training: bool = True, dim: int = -1
) -> Tensor:
    """Computes ``dropout(x + bias, p) + residual``, the end of a transformer's block, in x's dtype, shape and layout.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16 (half types are computed in
            float32).
        bias: (x.shape[dim],), along ``dim``, or None; x's dtype and device (autocast aligns the dtypes).
        residual: x's shape, dtype and device.
        p: the probability to drop an element; the others are multiplied by 1 / (1 - p).
        training: if False, nothing is dropped.

    Raises:
        ValueError: p is not between 0 and 1. RuntimeError: incompatible shapes, dtypes or devices.
    """
    return _dropout_act(x, bias, residual, p, training, CODES["none"], dim)


def _dropout_act(x, bias, residual, p, training, code, dim):
    require_share("p", p)
    p = float(p) if training else 0.0
    if not has_kernels(x) or p == 1:
        check_terms("dropout_act", x, bias, residual, dim)
        return _plain(x, bias, residual, p, code, dim)
    operator = _DIFFERENTIABLE if wants_gradient(x, bias, residual) else _INFERENCE
    return operator(x, bias, residual, *(_draw(x.device) if p else (None, 0, 0)), p, code, 0.01, dim)


def _draw(device):
    """Returns (state, seed, sequence) for the operators."""
    if being_traced() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.randint(_LEAST, _MOST, (2,), device=device), 0, 0
    if device.type == "cpu":
        return None, *torch.randint(_LEAST, _MOST, (2,)).tolist()
    generator = torch.cuda.default_generators[device.index]
    sequence = generator.get_offset()
    generator.set_offset(sequence + 4)
    # The seed differs from the seed of ATen's operators, so random words are different.
    seed = generator.initial_seed() ^ _OURS
    return None, seed - 2**64 if seed > _MOST else seed, sequence


_LEAST, _MOST = -(2**63), 2**63 - 1
_OURS = 0x6B66636F6E766572


def _plain(x, bias, residual, p, code, dim):
    """Computes the result with torch's dropout, which drops other elements."""
    y = F.dropout(BY_CODE[code].reference(_sum(x, bias, dim), 0.01), p)
    return y if residual is None else y + residual


def _sum(x, bias, dim):
    return x if bias is None else x + spread(bias, x, dim)


def _check(x, bias, residual, state, p, dim):
    operator = "dropout_act"
    check_terms(operator, x, bias, residual, dim)
    if state is not None:
        require(state.dtype == torch.int64 and state.numel() == 2, operator, "state must be two int64")
    require(0 <= p < 1, operator, f"p must be at least 0 and less than 1, got {p}")


def keep_mask(like: Tensor, state: Tensor | None, seed: int | Tensor, sequence: int | Tensor, p: float) -> Tensor:
    """Returns the mask of kept elements for the shape and dense layout of ``like``: the reference definition."""
    numel = like.numel()
    seed, sequence = (seed, sequence) if state is None else state.unbind()
    words = _philox(seed, sequence, torch.arange((numel + 3) // 4, device=like.device)).flatten()[:numel]
    in_memory = torch.empty_like(like, dtype=torch.bool)
    dropped = min(round(p * 2**32), 2**32 - 1)
    flat = in_memory.as_strided((numel,), (1,)).copy_(words >= dropped)
    return flat.as_strided(like.shape, in_memory.stride())


_LOW = 0xFFFFFFFF
_ROUNDS = 7  # the smallest number that passes all tests of the authors


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Returns the upper and lower 32 bits of the 64 bits of word * factor, unsigned in int64."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _philox(seed: int | Tensor, sequence: int | Tensor, block: Tensor) -> Tensor:
    """Returns (blocks, 4) words of 32 bits, as int64."""
    key = [seed & _LOW, (seed >> 32) & _LOW]
    zeros = torch.zeros_like(block)
    c = [block & _LOW, (block >> 32) & _LOW, zeros + (sequence & _LOW), zeros + ((sequence >> 32) & _LOW)]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _multiply(c[0], 0xD2511F53), _multiply(c[2], 0xCD9E8D57)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW]
    return torch.stack(c, -1)


def _drop(v, like, state, seed, sequence, p):
    return torch.where(keep_mask(like, state, seed, sequence, p), v / (1 - p), 0)


def _compose(x, bias, residual, state, seed, sequence, p, code, negative_slope, dim):
    _check(x, bias, residual, state, p, dim)
    y = _drop(BY_CODE[code].reference(_sum(x, bias, dim), negative_slope), x, state, seed, sequence, p)
    return torch.empty_like(x).copy_(y if residual is None else y + residual)


def _fake(x, bias, residual, state, seed, sequence, p, code, negative_slope, dim):
    _check(x, bias, residual, state, p, dim)
    return torch.empty_like(x)


def _compose_backward(grad, x, bias, state, seed, sequence, p, code, negative_slope, dim):
    activation, v = BY_CODE[code], _sum(x, bias, dim)
    saved = activation.reference(v, negative_slope) if activation.saves_output else v
    g = activation.backward(_drop(grad, x, state, seed, sequence, p), saved, negative_slope)
    return torch.empty_like(x).copy_(g)


def _differentiable_backward(grad, x, bias, state, seed, sequence, p, code, negative_slope, dim):
    """The gradient of x + bias."""
    with torch.enable_grad():
        v = _sum(x, bias, dim)

    def in_aten(v):
        return _drop(BY_CODE[code].reference(v, negative_slope), x, state, seed, sequence, p)

    return differentiable_gradients(in_aten, (v,), grad)[0]


def _fake_backward(grad, x, bias, state, seed, sequence, p, code, negative_slope, dim):
    return torch.empty_like(x)


def _compose_gradients(grad, x, bias, state, seed, sequence, p, code, negative_slope, dim):
    g = _compose_backward(grad, x, bias, state, seed, sequence, p, code, negative_slope, dim)
    return g, sum_by_channel(g, dim)


def _fake_gradients(grad, x, bias, state, seed, sequence, p, code, negative_slope, dim):
    return torch.empty_like(x), x.new_empty(x.shape[dim])


def _save(ctx, inputs, output):
    x, bias, _, state, *ctx.options = inputs
    ctx.save_for_backward(x, bias, state)


def _gradients(ctx, grad):
    """The gradients of x + bias, and of bias or None."""
    x, bias, state = ctx.saved_tensors
    x_needs, bias_needs = ctx.needs_input_grad[:2]
    if not (x_needs or bias_needs):
        return None, None
    if is_differentiated():
        g = _differentiable_backward(grad, x, bias, state, *ctx.options)
        return g, sum_by_channel(g, ctx.options[-1]) if bias_needs else None
    if bias_needs:
        return _GRADIENTS(grad, x, bias, state, *ctx.options)
    return _BACKWARD(grad, x, bias, state, *ctx.options), None


def _differentiate(ctx, grad):
    of_x, of_bias = _gradients(ctx, grad)
    x_needs, _, residual_needs = ctx.needs_input_grad[:3]
    return of_x if x_needs else None, of_bias, grad if residual_needs else None, *(None,) * 7


_OPTIONS = "Tensor? state, int seed, int sequence, float p, int activation, float negative_slope, int dim"
_OPERATOR, _INFERENCE = define_with_twin(
    f"dropout_act(Tensor x, Tensor? bias, Tensor? residual, {_OPTIONS}) -> Tensor", _compose, _fake
)
_BACKWARD = define(
    f"dropout_act_backward(Tensor grad, Tensor x, Tensor? bias, {_OPTIONS}) -> Tensor",
    _compose_backward,
    _fake_backward,
)
_GRADIENTS = define(
    f"dropout_act_gradients(Tensor grad, Tensor x, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor)",
    _compose_gradients,
    _fake_gradients,
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), cast_to_widest)
