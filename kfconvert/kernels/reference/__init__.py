"""The operators in plain ATen: their definitions, on any device and differentiable."""

from ...ops.declaration import OPERATORS
from .attention import *
from .blocks import *
from .contraction import *
from .derived import *
from .optimizers import *
from .reductions import *
from .series import *

__all__ = sorted(OPERATORS.keys() & globals().keys())
