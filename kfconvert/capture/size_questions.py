"""Records how the Python code of a forward uses free sizes in a trace, where the tracer adds no guard.

``torch.export`` guards comparisons of sizes whose results can differ for two sizes of at least 2. It guards neither
text made from a size nor a size as a key; here, such uses fix the traced size. Results that rely on free sizes being at
least 2 are recorded, so that sizes of 1 can be checked later.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..process import ThisThread
from ..region import Answer
from ..runtime import class_dict, is_of_author

# The methods by which Python code reads a size without a guard.
_UNGUARDED = [(kind, name) for kind in (SymInt, SymFloat, SymBool) for name in ("__repr__", "__str__", "__format__")]
_UNGUARDED.append((SymInt, "__hash__"))
_NUMBER: dict[type, type] = {SymInt: int, SymFloat: float, SymBool: bool}
# This library uses sizes as cache keys, and works without a cache where they have no hash.
_WITHOUT_HASHES = "einops"
# PyTorch's modules for size computations, between the reading code and the result.
_OF_SIZES = ("torch.fx.experimental.", "torch.utils._sympy.")
# Instructions that branch on a result at once.
_BRANCHING = ("POP_JUMP_", "JUMP_IF_", "TO_BOOL", "UNARY_NOT")
_NUMBERS = ("LOAD_CONST", "LOAD_SMALL_INT")
# Message functions, by module, which do not act on the text that they receive.
_MESSAGES = {
    "builtins": {"print"},
    "logging": {"debug", "info", "warning", "error", "log"},
    "torch": {"_assert", "_check", "_check_index", "_check_value", "_check_type", "_check_not_implemented"},
    "torch.autograd.profiler": {"record_function"},
    "transformers.utils.import_utils": {"torch_compilable_check"},
    "transformers.utils.logging": {"warning_once", "info_once", "warning_advice"},
    "warnings": {"warn"},
}
_TEXT = frozenset(("str", "repr", "format", "ascii", "join", "map"))


@contextmanager
def noted_questions() -> Iterator[list[Answer]]:
    """Context manager whose list collects the results of code that reads free sizes in this thread."""
    here = ThisThread()
    answers: dict[Answer, None] = {}
    evaluate = ShapeEnv.evaluate_sym_node

    @functools.wraps(evaluate)
    def noted(self: ShapeEnv, node: Any, *args: Any, **kwargs: Any) -> Any:
        expression = node.expr
        answer = evaluate(self, node, *args, **kwargs)
        frame = _asking(sys._getframe(1)) if here else None
        if frame is not None:
            found = Answer(expression, answer, not _branches(frame.f_code, frame.f_lasti))
            answers.setdefault(found)
        return answer

    own = {(kind, name): vars(kind).get(name) for kind, name in _UNGUARDED}
    collected: list[Answer] = []
    setattr(ShapeEnv, "evaluate_sym_node", noted)  # noqa: B010 - mypy rejects assignment to a method
    for kind in _NUMBER:  # setattr would set the class of the class; the next setattr invalidates caches
        class_dict(kind)["__class__"] = property(_class_told(kind, here))
    for kind, name in _UNGUARDED:
        setattr(kind, name, _told(kind, name, here))
    try:
        yield collected
    finally:
        setattr(ShapeEnv, "evaluate_sym_node", evaluate)  # noqa: B010
        for kind in _NUMBER:
            del class_dict(kind)["__class__"]
        for (kind, name), function in own.items():
            if function is None:
                delattr(kind, name)
            else:
                setattr(kind, name, function)
        here.over = True
        collected.extend(answers)


def _told(kind: type, name: str, here: ThisThread) -> Callable[..., Any]:
    own = getattr(kind, name)

    @functools.wraps(own)
    def tell(self: Any, *args: Any) -> Any:
        frame = _asking(sys._getframe(1)) if here else None
        if frame is None or (name == "__hash__" and _module(frame).startswith(_WITHOUT_HASHES)):
            return own(self, *args)
        if name != "__hash__" and self.node.hint is not None and _is_message(frame):
            return getattr(self.node.hint, name)(*args)
        return getattr(_fixed(self), name)(*args)

    return tell


def _class_told(kind: type, here: ThisThread) -> Callable[[Any], type]:
    """``__class__`` for ``isinstance`` checks of a size: for the code of a model's author, it is a number."""

    def tell(size: Any) -> type:
        # Called several hundred thousand times in a trace, mostly by PyTorch.
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        return _NUMBER[kind] if _owner(asking) == "author" and here else kind

    return tell


def _fixed(size: Any) -> Any:
    """The number behind a size, which the trace treats as constant from now on."""
    return _NUMBER[type(size)](size)


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame of a model's author, or of a standard library module that it calls, which reads a size; None where
    PyTorch reads it."""
    while frame is not None and (_owner(_module(frame)) == "sizes" or frame.f_code.co_filename == torch.__file__):
        frame = frame.f_back
    caller = frame
    while caller is not None and _owner(_module(caller)) == "python":
        caller = caller.f_back
    return frame if caller is not None and _owner(_module(caller)) == "author" else None


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


@functools.lru_cache(1000)  # a trace reads thousands of sizes, each through many frames
def _owner(module: str) -> str:
    if module.startswith(_OF_SIZES):
        return "sizes"
    if module.partition(".")[0] in sys.stdlib_module_names:
        return "python"
    return "author" if is_of_author(module) else "library"


@functools.lru_cache(256)
def _branches(code: CodeType, position: int) -> bool:
    """Whether the code branches on the result itself. Otherwise C code does, such as a comparison of tuples, and the
    questions that would follow another result are unknown."""
    before = None
    for each in dis.get_instructions(code):
        if each.offset == position:
            if each.opname.startswith(_BRANCHING):
                return True
            # Since Python 3.13, a comparison itself converts its result to bool. With a number, it compares numbers.
            number = before is not None and before.opname in _NUMBERS and isinstance(before.argval, (int, float))
            return each.opname == "COMPARE_OP" and number and sys.version_info >= (3, 13)
        if each.opname != "CACHE":
            before = each
    return False


def _is_message(frame: FrameType) -> bool:
    """Whether the current line of ``frame`` uses all text for messages, or only checks whether it is empty."""
    tree = _tree(tuple(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    if tree is None:
        return False
    line = frame.f_lineno
    around = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.stmt)) and _covers(node, line)]
    parents: dict[ast.AST, ast.AST] = {}
    for node in around:
        parents |= {child: node for child in ast.iter_child_nodes(node)}
    texts = [node for node in around if isinstance(node, ast.JoinedStr)]
    others = {getattr(node, "id", getattr(node, "attr", None)) for node in around}
    modulo = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in around)
    if not texts or modulo or others & _TEXT:
        return False
    return all(_goes_unread(text, parents.get(text), frame) for text in texts)


def _covers(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


@functools.lru_cache(4)
def _tree(lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines)) if lines else None
    except SyntaxError:
        return None


def _goes_unread(text: ast.JoinedStr, parent: ast.AST | None, frame: FrameType) -> bool:
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and parent.test is text:
        return any(isinstance(part, ast.Constant) and part.value for part in text.values)
    if not isinstance(parent, ast.Call) or text not in parent.args:
        return False
    names = ast.unparse(parent.func).split(".")
    scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
    value = next((scope[names[0]] for scope in scopes if names[0] in scope), None)
    for name in names[1:]:
        value = inspect.getattr_static(value, name, None) if inspect.ismodule(value) else getattr(value, name, None)
    return getattr(value, "__name__", None) in _MESSAGES.get(getattr(value, "__module__", None) or "", ())
