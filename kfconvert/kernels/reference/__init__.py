"""The operators in plain ATen: their definitions, on any device and differentiable."""

from ...ops.declaration import OPERATORS
from .attention import *
from .blocks import *
from .contraction import *
from .elementwise import *
from .norms import *
from .optimizers import *
from .reductions import *
from .series import *
from .softmax import *

globals().update({name: operator.reference for name, operator in OPERATORS.items() if operator.reference})
__all__ = sorted(OPERATORS.keys() & globals().keys())
