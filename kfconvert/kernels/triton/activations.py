"""The activations of kfconvert.ops as a function for Triton kernels, of float32 values.

Comparisons replace minima and maxima, in which Triton drops NaN. exp is Triton's, whose relative error grows with its
argument, because it computes exp(x) as 2^(x / log 2) with a rounded exponent.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(v):
    """Computes (1 - exp(-2|v|)) / (1 + exp(-2|v|)) with v's sign, or a series near 0, where that loses digits."""
    e = tl.exp(-2.0 * tl.abs(v))
    far = (1.0 - e) / (1.0 + e)
    z = v * v
    near = v * (1.0 + z * (-0.33333333 + z * (0.13333333 + z * (-0.053968254 + z * 0.021869489))))
    return tl.where(z < 0.0625, near, tl.where(v < 0, -far, far))


@triton.jit
def sixth(v):
    """Computes the hard sigmoid: v + 3 clamped to 0 to 6, divided by 6."""
    v = v + 3.0
    return tl.where(v < 0, 0.0, tl.where(v > 6, 6.0, v)) / 6.0


@triton.jit
def activate(v, NAME: tl.constexpr, negative_slope):
    """Computes the activation NAME of kfconvert.ops.activations; negative_slope: slope of leaky_relu."""
    if NAME == "relu":
        v = tl.where(v < 0, 0.0, v)
    elif NAME == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.70710678))
    elif NAME == "gelu_of_half":
        # v sigmoid(v p(v^2)), within 6e-7 of the above with half as many instructions; p is a minimax fit up to 5.5.
        z = tl.where(v * v > 30.25, 30.25, v * v)
        p = (((-5.2099054e-9 * z + 3.85044842e-7) * z - 1.14524273e-5) * z + 1.59389398e-4) * z + 9.55929936e-5
        v = v / (1.0 + tl.exp2(v * ((p * z - 0.10483858) * z - 2.30220723)))
    elif NAME == "gelu_tanh":
        v = v / (1.0 + tl.exp(-1.5957691 * (v + 0.044715 * v * v * v)))  # (1 + tanh(u)) / 2 is sigmoid(2 u)
    elif NAME == "silu":
        v = v / (1.0 + tl.exp(-v))
    elif NAME == "tanh":
        v = tanh(v)
    elif NAME == "sigmoid":
        v = 1.0 / (1.0 + tl.exp(-v))
    elif NAME == "relu6":
        v = tl.where(v < 0, 0.0, tl.where(v > 6, 6.0, v))
    elif NAME == "hardswish":
        v = v * sixth(v)
    elif NAME == "leaky_relu":
        v = tl.where(v > 0, v, v * negative_slope)
    elif NAME == "quick_gelu":
        v = v / (1.0 + tl.exp(-1.702 * v))
    elif NAME == "hardsigmoid":
        v = sixth(v)
    elif NAME == "exp_twice":
        v = tl.exp(v * 2.0)
    elif NAME == "mish":
        # With e = exp(v), tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1): 1 long before e^2 overflows.
        e = tl.exp(v)
        v = tl.where(v > 20, v, v * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0))
    else:
        tl.static_assert(NAME == "none", "unknown activation")
    return v
