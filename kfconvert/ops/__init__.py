"""Functional operators, which work on any device, with or without the compiled library.

``fused`` has the operators of the fused modules, and ``standalone`` has operators for direct use. All lists of
operators come from their declarations (declaration.py).
"""

from .. import second_names
from .activations import ACTIVATIONS, Activation, apply_activation
from .arguments import checked
from .declaration import OPERATORS
from .fused import *
from .fused.next_token import next_token_ as next_token_
from .standalone import *

for _name in OPERATORS:
    globals()[_name] = checked(globals()[_name])
    globals()[_name].__module__ = __name__  # pickle finds it by this name

globals().update(second_names.of(__name__))
__all__ = sorted(["ACTIVATIONS", "Activation", "SoftMaxOp", *OPERATORS, *second_names.TABLE[__name__]])
