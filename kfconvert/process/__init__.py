"""Process-wide effects of a conversion: the conversion lock, isolation from other threads, garbage collection, stack
levels of warnings, and collectives."""

from .callers import level_outside
from .collectives import alone, noted_collectives
from .garbage import garbage_collected, garbage_collected_once
from .generators import same_generators
from .patches import forward_over, method_over, replaced
from .quiet import quiet_thread
from .shards import OF_SHARD, is_one_of_several, shard_of
from .shield import is_cudnn_attention_enabled, libraries, shielded, switched_off, without_cudnn_attention
from .turns import ThisThread, one_at_a_time
