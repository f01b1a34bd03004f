"""What concerns the whole process while one thread converts: turns, what other threads see, garbage,
and that no other process is waited for."""

from .collectives import CannotBeAlone, Collective, alone, noted_collectives
from .garbage import only_new_garbage
from .generators import same_generators
from .patches import replaced
from .quiet import quiet_thread
from .shards import is_one_of_several, shard_of
from .shield import Shield, is_of_trace, libraries, switched_off
from .turns import ThisThread, one_at_a_time

__all__ = [
    "CannotBeAlone",
    "Collective",
    "Shield",
    "ThisThread",
    "alone",
    "is_of_trace",
    "is_one_of_several",
    "libraries",
    "noted_collectives",
    "one_at_a_time",
    "only_new_garbage",
    "quiet_thread",
    "replaced",
    "same_generators",
    "shard_of",
    "switched_off",
]
