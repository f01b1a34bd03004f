"""Functional operators: each works on any device, with or without the compiled library.

``fused`` has those that the fused modules call, ``standalone`` those for use by hand; what is said of each beside its
function (declaration.py) makes the lists of them.
"""

from .. import second_names
from .activations import ACTIVATIONS, Activation, apply_activation
from .declaration import OPERATORS
from .fused import *
from .fused.next_token import next_token_ as next_token_
from .kinds import checked
from .standalone import *

for _name in OPERATORS:
    globals()[_name] = checked(globals()[_name])
    globals()[_name].__module__ = __name__  # where it is found by its name, as pickle does

globals().update(second_names.of(__name__))
__all__ = sorted(["ACTIVATIONS", "Activation", "SoftMaxOp", *OPERATORS, *second_names.TABLE[__name__]])
