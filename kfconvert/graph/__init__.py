"""Graphs of ATen calls: patterns of calls, memory aliases, and source locations."""

from .aliases import Aliases, aliased_arguments, is_written, mark_storage, new_storage, storage_of, written_arguments
from .bindings import lower
from .constants import constant_value, same_kind, spell_numbers
from .memory_order import is_laid_out, mark_laid_out, mark_orders, marked_order, only_splits, order_in_memory
from .nodes import communicates, draws, has_effect, is_of_module, is_parameter, is_weight, mark_weights, module_path
from .schemas import schema_of
from .sizes import fixed_size, same_sizes, sizes_of, spell_sizes
from .sources import at, blame, definition, location, mark_location, place_now
from .trees import AnyNumber, Either, Number, Op, Together, Tree, Var, arguments, aten, parts, required, roots, unify
from .views_or_copies import LAYOUT_READERS, is_to_memory_format, written_by_layout
