"""What a converted model runs: a guard over all that its program relies on, then the program."""

from .code import OF_COMPILERS, class_dict, is_same_compiled, whole_walk
from .code_state import Codes
from .configuration import grouped_by_class, recorded_reads, without_cache
from .contents import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    OfConversion,
    generators,
    is_config_dict,
    is_of_author,
    is_plain_object,
    plain_objects,
    reached,
    slotted,
)
from .cuda_graphs import CALLS_BEFORE, MOST_RECORDINGS, CudaGraphs, can_record, library_switches
from .derived import Derived, memory_of
from .evidence import NoEvidence, evidence_of
from .freezing import FrozenError, freeze
from .guarded import GuardedForward, guarded_forward, install, uninstall
from .holdings import configurations
from .hooks import global_hook, has_hooks, inner_hook, remedy
from .ledger import Ledger, MissNotices
from .merged_weights import merge, separate, whole
from .miss_callback import MissCallback, OnMiss
from .names_in_code import reads_of_attributes
from .onlookers import default_device, function_mode
from .original_forwards import originals
from .program import OF_EXPORT, Program, UnfitTensors
from .random_generators import GENERATORS, as_bytes, generator_state, put_back
from .recompute import autograd_nodes
from .recording import Pool, Recording, Repeated, Unrecordable
from .tensor_facts import ELEMENTS, LAYOUT, UNKNOWN, Asked, asked_attributes, attribute_facts, named_by_code, unsteady
from .variant import Variant
from .watch import MISSING, ROOT, Entry, Watch, inside
from .weak_module import WeakModule

__all__ = [
    "OF_COMPILERS",
    "Asked",
    "CALLS_BEFORE",
    "Codes",
    "CudaGraphs",
    "Derived",
    "ELEMENTS",
    "Entry",
    "FrozenError",
    "GENERATORS",
    "GuardedForward",
    "Ledger",
    "MISSING",
    "OF_EXPORT",
    "MOST_RECORDINGS",
    "MissCallback",
    "MissNotices",
    "OF_CONVERSION",
    "LAYOUT",
    "OF_EVERY_MODULE",
    "OfConversion",
    "OnMiss",
    "Pool",
    "Program",
    "ROOT",
    "Recording",
    "Repeated",
    "UnfitTensors",
    "Unrecordable",
    "UNKNOWN",
    "NoEvidence",
    "Variant",
    "WeakModule",
    "as_bytes",
    "asked_attributes",
    "attribute_facts",
    "autograd_nodes",
    "named_by_code",
    "Watch",
    "can_record",
    "class_dict",
    "configurations",
    "default_device",
    "evidence_of",
    "freeze",
    "function_mode",
    "generator_state",
    "generators",
    "global_hook",
    "grouped_by_class",
    "guarded_forward",
    "has_hooks",
    "inner_hook",
    "inside",
    "install",
    "memory_of",
    "merge",
    "is_config_dict",
    "is_of_author",
    "is_same_compiled",
    "is_plain_object",
    "library_switches",
    "originals",
    "plain_objects",
    "put_back",
    "reached",
    "reads_of_attributes",
    "recorded_reads",
    "remedy",
    "separate",
    "slotted",
    "uninstall",
    "unsteady",
    "whole",
    "whole_walk",
    "without_cache",
]
