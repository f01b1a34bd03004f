"""Example inputs: from the user, as a call, and as JSON."""

from .caches import (
    CacheKind,
    CachePlace,
    TreeForm,
    UnknownCache,
    cache_of_tokens,
    caches_in,
    is_cache,
    is_resident,
    keep_apart,
    layers_of,
    map_tensors,
    taken_apart,
    twin,
    with_cache_of_tokens,
)
from .call_form import MAX_SPELLINGS, CallForm
from .equality import is_equal
from .example import (
    ExampleCall,
    InputError,
    call_of,
    copy_of,
    example_call,
    holds_tokens,
    is_encoder_decoder,
    is_token_model,
    is_whole,
    numbered,
    repeated_to,
    resized,
    shown,
    to_each,
    token_calls,
    variations,
    widened,
)
from .lookups import bounded_lookups
from .records import ClassName, class_name
from .spec import InputSpecError, build, described
from .static_cache import SEQUENCES, STATES, as_static, capacity_for, set_tensor, tensors_of
from .stored_values import Reader, Unstorable, Writer
from .weighted_inputs import Weighted, weighted
