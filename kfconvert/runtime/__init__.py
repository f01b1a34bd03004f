"""The runtime of a converted model: a guard over everything that its program relies on, then the program."""

from .dispatch.freezing import FrozenError, freeze
from .dispatch.guarded import GuardedForward, guarded_forward, install, install_training, uninstall
from .dispatch.ledger import Ledger
from .dispatch.notices import OnMiss
from .dispatch.original_forwards import originals
from .dispatch.recompute import autograd_nodes
from .recording.capture_streams import CaptureStream, one_capture
from .recording.cuda_graphs import CALLS_BEFORE, MOST_RECORDINGS, CudaGraphs, can_record, kind_of_call, library_switches
from .recording.generated import Generated, Ungenerated
from .recording.merged_weights import merge, separate, whole
from .recording.program import Program
from .recording.recording import (
    Pool,
    Recording,
    Repeated,
    Unrecordable,
    bytes_without_gaps,
    has_no_overlap,
    like,
)
from .recording.variant import Variant
from .state.active_modes import default_device, function_mode
from .state.authors import is_of_author
from .state.code import whole_walk
from .state.configuration import recorded_reads
from .state.derived import Derived, memory_of
from .state.evidence import NoEvidence, evidence_of
from .state.fingerprint import fingerprints
from .state.hooks import HOOK_KINDS, global_hook, has_hooks, inner_hook, remedy
from .state.ran_code import RanCode, plain_text
from .state.random_generators import GENERATORS, as_bytes, generator_state, put_back
from .state.references import (
    OF_EVERY_MODULE,
    OfConversion,
    configurations,
    is_plain_object,
    reached,
    settings_of,
    slotted,
    without_conversion,
)
from .state.watch import MISSING, ROOT, Entry, Watch
from .state.watched_places import OF_EXPORT
from .state.weak_module import WeakModule
