"""The guard of a region as JSON values."""

from __future__ import annotations

from typing import Any

from .expressions import Unstorable, made_expression, stored_expression, symbol
from .guard import Answer, Guard, TensorGuard
from .stored_values import made_constant, made_device, stored_constant, stored_device


def _stored_answer(answer: Answer) -> list[Any]:
    value = answer.value
    told = stored_constant(value) if type(value) is float else stored_expression(value)  # sympy has different numbers
    return [stored_expression(answer.expression), told, answer.within]


def stored_guard(guard: Guard) -> dict[str, Any]:
    """Returns ``guard`` as JSON values for ``made_guard``. Raises Unstorable."""
    answers = list(guard.answers)
    return {
        "tensors": [
            {
                "index": each.index,
                "dtype": str(each.dtype).removeprefix("torch."),
                "device": stored_device(each.device),
                "sizes": [stored_expression(size) for size in each.sizes],
            }
            for each in guard.tensors
        ],
        "constants": [[index, stored_constant(value)] for index, value in guard.constants],
        "constraints": [stored_expression(each) for each in guard.constraints],
        "ranges": {str(size): list(bounds) for size, bounds in guard.ranges.items()},
        "free": {name: [list(place) for place in places] for name, places in guard.free.items()},
        "one_is_safe": sorted(str(size) for size in guard.one_is_safe),
        "answers": [_stored_answer(answer) for answer in answers],
        "tried": sorted(sorted(answers.index(answer) for answer in tried) for tried in guard.tried),
        "may_be_one": sorted(map(list, guard.may_be_one)),
    }


def made_guard(stored: dict[str, Any]) -> Guard:
    """Rebuilds the guard from the form in ``artifact.schema``. Raises Unstorable."""
    answers = [
        Answer(made_expression(expression), made_constant(value), within)
        for expression, value, within in stored["answers"]
    ]
    if any(isinstance(answer.expression, int) for answer in answers):
        raise Unstorable("an answer does not refer to a size")
    tensors = [
        TensorGuard(
            each["index"],
            made_constant({"dtype": each["dtype"]}),
            made_device(each["device"]),
            tuple(made_expression(size) for size in each["sizes"]),
        )
        for each in stored["tensors"]
    ]
    try:
        tried = {frozenset(answers[index] for index in indices) for indices in stored["tried"]}
    except IndexError:
        raise Unstorable("a guard names an answer that it does not have") from None
    return Guard(
        tensors,
        [(index, made_constant(value)) for index, value in stored["constants"]],
        [made_expression(each) for each in stored["constraints"]],
        {symbol(name): (lower, upper) for name, (lower, upper) in stored["ranges"].items()},
        {name: [(index, dimension) for index, dimension in places] for name, places in stored["free"].items()},
        set(map(symbol, stored["one_is_safe"])),
        answers,
        tried,
        set(map(tuple, stored["may_be_one"])),
    )
