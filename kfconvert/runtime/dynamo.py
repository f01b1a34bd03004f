"""What a forward has to know of the trace that torch.compile makes of it, from inside of that trace.

None of this is documented by PyTorch. Where something is not as it is expected here, the answer is the one with which
the original forward stays in the trace.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import fx

from ..inputs import is_equal
from .watch import MISSING


class OriginalPass(threading.local):
    """The pass of a trace through the original forward of a converted model, which Dynamo follows for its guards: it
    looks, at later calls, at all that it has seen the original read.

    The graph is then to hold the calls of the program only: those of the original have no users, and are erased.
    """

    def __init__(self):
        self._trace: weakref.ref[Any] | None = None
        self._owner = 0
        self._before: set[fx.Node] = set()

    def is_open(self, owner: object) -> bool:
        """Whether the original forward of another than ``owner``, around it, is being followed in this trace."""
        trace = _current_trace()
        return trace is not None and self._trace is not None and self._trace() is trace and self._owner != id(owner)

    def begin(self, owner: object) -> None:
        trace = _current_trace()
        self._trace = None if trace is None else weakref.ref(trace)
        self._owner = id(owner)
        self._before = set() if trace is None else set(trace.graph.nodes)

    def end(self, drop: bool) -> str | None:
        """None where what was traced since ``begin`` is one graph, and may be left out; else why not. It is left out
        where ``drop`` says so."""
        before, begun = self._before, self._trace
        self._trace, self._before = None, set()
        trace = _current_trace()
        is_one = begun is not None and begun() is trace
        if trace is None or not is_one:
            return "torch.compile breaks it into several graphs"
        if not drop:
            return None
        try:
            if not trace.is_root_tracer():
                return "it is called in a block that is traced on its own"
            if any(map(_is_symbolic_float, trace.graph.nodes)):
                return "torch.compile takes a float for a symbol, whose value the program has"
            if _changed_something(trace.side_effects):
                return "objects are changed in the compiled code around it, or by itself"
            passed = [node for node in trace.graph.nodes if node not in before]
            trace.add_graph_finalizer(lambda module: _erase(module, passed))
        except Exception as error:  # PyTorch's internals may be others
            return f"torch.compile keeps its state in another way ({type(error).__name__})"
        return None


def _current_trace() -> Any:
    """The OutputGraph of the trace that this thread is in; None outside of one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except Exception:  # there is none
        return None


def _is_symbolic_float(node: fx.Node) -> bool:
    """Whether ``node`` is a Python float that Dynamo hands to the graph, and on whose value it does not guard: one that
    has had several values at a place."""
    return node.op == "placeholder" and bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _changed_something(effects: Any) -> bool:
    """Whether the trace will, at its end, have changed an object that was there before: the objects themselves are
    still as they were. Where an attribute is to get the value that it has, as context variables do, nothing changes."""
    if effects.ignore_mutation_on_these_variables:  # torch.func.functional_call puts other tensors into a model
        return True
    for variable in effects.id_to_variable.values():
        if variable.mutation_type is None or type(variable.mutation_type).__name__.endswith("New"):
            continue
        if not effects.is_modified(variable):
            continue
        written = effects.store_attr_mutations.get(variable)
        if not written or _is_base_modified(variable, effects):
            return True
        if not all(_is_held(variable.value, name, value) for name, value in written.items()):
            return True
    return False


def _is_base_modified(variable: Any, effects: Any) -> bool:
    """Whether the dict, list or tuple that an object is besides was changed."""
    by_this_name = getattr(variable, "is_base_vt_modified", None)  # before torch 2.12 the other
    found: bool = (by_this_name or variable.is_underlying_vt_modified)(effects)
    return found


def _is_held(holder: Any, name: str, value: Any) -> bool:
    held = vars(holder).get(name, MISSING)
    return value.is_python_constant() and is_equal(value.as_python_constant(), held)


def _erase(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Erase those of ``nodes`` that nobody uses."""
    there = set(module.graph.nodes)
    for node in reversed(nodes):
        if node in there and not node.users and node.op in ("call_function", "call_method", "get_attr"):
            module.graph.erase_node(node)
    module.recompile()
