"""Triton kernels of some operators, forward only: float32, float16 and bfloat16 on CUDA, computed in float32.

Signatures and results are those of kfconvert.ops. What it takes and these do not is a RuntimeError of one
line: float64, a gradient, autocast, and for norms and softmax rows of more than 131072 elements (beyond 32768
they are slow: a program keeps its row in registers). Tensors that do not lie in memory as the result does are
copied first. With ``TRITON_INTERPRET=1`` in the environment before the import the kernels run in Triton's
interpreter, on CPU tensors as well.
"""

from ...ops.declaration import OPERATORS
from .bias import *
from .combine import *
from .norms import *
from .quantize import *
from .rope import *
from .softmax import *

__all__ = sorted(OPERATORS.keys() & globals().keys())
