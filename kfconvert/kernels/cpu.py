"""The compiled CPU kernels: the functions of kfconvert.ops, for CPU tensors, never on plain ATen.

They have the operators' gradients, some of which use ATen's formulas. PyTorch's libraries compute the products of
linear_act and conv_act. A tensor on another device, a call that kfconvert.ops runs in ATen, and a missing compiled
library raise a one-line RuntimeError.
"""

from .compiled import NAMES, family

globals().update(family("cpu"))

__all__ = NAMES
