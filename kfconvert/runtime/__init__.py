"""The runtime of a converted model: a guard over everything that its program relies on, then the program."""

from .dispatch.freezing import FrozenError, freeze
from .dispatch.guarded import GuardedForward, guarded_forward, install, uninstall
from .dispatch.ledger import Ledger
from .dispatch.notices import Notices, OnMiss
from .dispatch.original_forwards import originals
from .dispatch.recompute import autograd_nodes
from .recording.cuda_graphs import CALLS_BEFORE, MOST_RECORDINGS, CudaGraphs, can_record, library_switches
from .recording.merged_weights import merge, separate, whole
from .recording.program import Program
from .recording.recording import Pool, Recording, Repeated, Unrecordable
from .recording.variant import Variant
from .state.active_modes import default_device, function_mode
from .state.authors import is_of_author
from .state.code import class_dict, whole_walk
from .state.code_state import Codes
from .state.configuration import grouped_by_class, recorded_reads, without_cache
from .state.derived import Derived, memory_of
from .state.evidence import NoEvidence, evidence_of
from .state.fingerprint import fingerprints
from .state.hooks import global_hook, has_hooks, inner_hook, remedy
from .state.random_generators import GENERATORS, as_bytes, generator_state, put_back
from .state.references import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    OfConversion,
    configurations,
    generators,
    is_config_dict,
    is_plain_object,
    reached,
    slotted,
)
from .state.tensor_facts import (
    AUTOGRAD,
    LAYOUT,
)
from .state.watch import MISSING, ROOT, Entry, Watch
from .state.watched_places import OF_EXPORT
from .state.weak_module import WeakModule

__all__ = [
    "AUTOGRAD",
    "CALLS_BEFORE",
    "Codes",
    "CudaGraphs",
    "Derived",
    "Entry",
    "FrozenError",
    "GENERATORS",
    "GuardedForward",
    "Ledger",
    "MISSING",
    "OF_EXPORT",
    "MOST_RECORDINGS",
    "Notices",
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
    "Unrecordable",
    "NoEvidence",
    "Variant",
    "WeakModule",
    "as_bytes",
    "autograd_nodes",
    "Watch",
    "can_record",
    "class_dict",
    "configurations",
    "default_device",
    "evidence_of",
    "fingerprints",
    "freeze",
    "function_mode",
    "generator_state",
    "generators",
    "global_hook",
    "grouped_by_class",
    "guarded_forward",
    "has_hooks",
    "inner_hook",
    "install",
    "memory_of",
    "merge",
    "is_config_dict",
    "is_of_author",
    "is_plain_object",
    "library_switches",
    "originals",
    "put_back",
    "reached",
    "recorded_reads",
    "remedy",
    "separate",
    "slotted",
    "uninstall",
    "whole",
    "whole_walk",
    "without_cache",
]
