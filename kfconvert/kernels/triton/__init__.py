"""Triton kernels of the functions of two tensors, the norms of rows and linear layers, forward only: float32, float16
and bfloat16 on CUDA, computed in float32.

Signatures and results match kfconvert.ops. Unsupported arguments raise a one-line RuntimeError: float64, gradients,
autocast, and for norms rows of more than 131072 elements (rows above 32768 are slow, because a program
keeps its row in registers). Tensors with another memory layout than the result are copied first. With
``TRITON_INTERPRET=1`` in the environment before the import, the kernels run in Triton's interpreter, also on CPU
tensors.
"""

from ...ops.declaration import OPERATORS
from . import attention as _attention  # registers its kernel
from .combine import *
from .linear import *
from .norms import *

__all__ = sorted(OPERATORS.keys() & globals().keys())
