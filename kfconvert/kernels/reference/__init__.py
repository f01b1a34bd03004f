"""The operators in plain ATen: their definitions, on any device and differentiable."""

from ...ops.declaration import OPERATORS
from .attention import *
from .blocks import *
from .derived import *

__all__ = sorted(OPERATORS.keys() & globals().keys())
