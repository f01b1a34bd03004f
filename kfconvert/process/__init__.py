"""What concerns the whole process while one thread converts: turns, what other threads see, garbage."""

from .garbage import only_new_garbage
from .generators import same_generators
from .patches import replaced
from .quiet import quiet_thread
from .shield import Shield, is_of_trace, libraries, switched_off
from .turns import ThisThread, one_at_a_time

__all__ = [
    "Shield",
    "ThisThread",
    "is_of_trace",
    "libraries",
    "one_at_a_time",
    "only_new_garbage",
    "quiet_thread",
    "replaced",
    "same_generators",
    "switched_off",
]
