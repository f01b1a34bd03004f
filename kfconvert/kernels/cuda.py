"""The compiled CUDA kernels: the functions of kfconvert.ops, for CUDA tensors, never on plain ATen.

They have the operators' gradients, some of which are ATen's formulas. The products of linear_act and
conv_act are those of PyTorch's libraries, as there. A tensor on another device, a call that kfconvert.ops
hands to ATen, and a missing compiled library are a RuntimeError of one line.
"""

from .compiled import NAMES, family

globals().update(family("cuda"))

__all__ = NAMES
