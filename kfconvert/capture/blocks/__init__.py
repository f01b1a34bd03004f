"""Blocks of one structure, traced once."""

from .regions import region_of_block
from .replay import Repetition
from .structure import by_integers, groups, inside, integers, is_operator, unread

__all__ = [
    "Repetition",
    "by_integers",
    "groups",
    "inside",
    "integers",
    "is_operator",
    "region_of_block",
    "unread",
]
