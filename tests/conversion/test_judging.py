"""Sites that make the outputs inaccurate are found and dropped, and chance is told from a loss of accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain, repeat
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from kfconvert.accuracy import Original
from kfconvert.conversion.judge import MOST_BLAMED, Judge, drop_inaccurate
from kfconvert.inputs.example import ExampleCall


def item(name: str, error_ratio: float | None = 1.0) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=name, error_ratio=error_ratio)]


def names(items) -> list[str]:
    return [site.name for item in items for site in item]


def dropped(items, error) -> tuple[list[str], bool]:
    """What is dropped of the items where the model has ``error``, a function of names, relative to what is allowed; it
    is none or as large as possible where that says True or False."""

    def judge(some, briefly=False):
        found = error(names(some))
        ratio = None if isinstance(found, bool) else found
        return SimpleNamespace(passed=found <= 1 if ratio is not None else not found, reason="too far off", ratio=ratio)

    gone: list[str] = []

    def drop(item, reason):
        assert "too far off" in reason
        gone.extend(names([item]))

    return gone, drop_inaccurate(items, judge(items), judge, drop).passed


def test_the_culprits_are_dropped_and_no_others():
    items = [item(str(index)) for index in range(40)]
    assert dropped(items, lambda some: bool({"7", "31"} & set(some))) == (["7", "31"], True)
    assert dropped(items, lambda some: 0.5 + 3 * len({"7", "31"} & set(some))) == (["7", "31"], True)
    assert dropped(items, lambda some: False) == ([], True)
    assert dropped(items[:2], lambda some: True) == (["0", "1"], False)  # the cause is none of them


def test_of_many_that_fail_together_the_least_accurate_are_dropped():
    items = [item(str(index), error_ratio=index * 7 % 20) for index in range(20)]
    ratios = {name: one[0].error_ratio for one in items for name in names([one])}
    for error, most in ((lambda total: total > 60, MOST_BLAMED), (lambda total: total / 60, 1)):
        gone, passed = dropped(items, lambda some, error=error: error(sum(ratios[name] for name in some)))
        assert passed and len(gone) < 14
        first, rest = gone[:most], gone[most:]
        kept = ratios.keys() - set(gone)
        assert len(first) == most and min(ratios[name] for name in rest) >= max(ratios[name] for name in kept)


class Scaled(nn.Module):
    """Returns its input; the errors of its outputs are made by ``judged``."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def judged(original: list[float], converted: list[float], threshold: float = 1e-9):
    """The judgement of a model whose error on each call is that of ``converted``, the original's that of ``original``.

    The calls are the example and its variations, in the order in which they are made.
    """
    call = ExampleCall((torch.arange(1.0, 9.0),))
    judge = Judge(Scaled().eval(), call, call.args[0], threshold)
    judge._variations = judge._variations[-len(original) + 1 :] if len(original) > 1 else []
    sample, own, calls = judge._sample, iter(original), []

    def off(call):
        given, made = sample(call)
        return given, Original(made.reference, made.outputs * (1 + next(own)))

    judge._samples, judge._sample = [off(call)], off

    def run(call):
        calls.append(call)
        return call.args[0] * (1 + converted[max(0, len(calls) - 2)])

    return judge(run), len(calls)


def test_chance_does_not_hide_a_loss_of_accuracy():
    result, calls = judged([1e-5], [1e-5])
    assert result.passed and calls == 1  # one call is enough where it is clear
    result, calls = judged([1e-5, 1e-5, 1e-5, 1e-5], [1.4e-5, 2e-5, 1e-5, 1e-5])
    assert not result.passed and calls == 4


def test_chance_is_told_from_a_loss_of_accuracy():
    lucky = [1e-5, 4e-5, 4e-5, 4e-5]
    result, calls = judged(lucky, [2e-5, 4e-5, 4e-5, 4e-5])
    assert result.passed and calls == 4
    assert result.original_error.max_rel > 3e-5
    result, _ = judged(lucky, [2e-5, 4e-5, 7e-5, 4e-5])
    assert not result.passed and "allowed is 6.0e-05" in result.reason


def test_few_values_that_fail_are_asked_for_further_inputs():
    lucky = [1e-5] * 4 + [2e-5] * 8
    result, calls = judged(lucky, [2e-5] * 12)
    assert result.passed and calls == 12
    result, calls = judged(lucky, [2e-5] * 10 + [4e-5])
    assert not result.passed and calls == 12


def test_an_error_near_the_threshold_leaves_room_for_other_inputs():
    own = [1e-5] * 4
    result, _ = judged(own, [8e-5, 6e-5, 6e-5, 6e-5], threshold=1e-4)
    assert not result.passed and "allowed is 7.0e-05" in result.reason and result.accuracy_threshold == 1e-4
    assert judged(own, [6e-5] * 4, threshold=1e-4)[0].passed


def off_by(errors: Tensor, values: int, original: Sequence[float] = (1e-5,)) -> tuple[bool, int]:
    """Whether outputs with these relative errors pass, and in how many calls.

    Those of the original are 0 to a largest one, which ``original`` gives for its calls, the last for all that follow.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(values, generator=generator, dtype=torch.float64) + 1
    largest = chain(original, repeat(original[-1]))

    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.dtype is torch.float64 else x * (1 + torch.linspace(0, next(largest), x.numel()))

    calls = []

    def run(call: ExampleCall) -> Tensor:
        calls.append(call)
        return call.args[0] * (1 + errors)

    model, x = Rounding().eval(), x.float()
    return Judge(model, ExampleCall((x,)), model(x), 1e-9)(run).passed, len(calls)


def test_the_mean_error_of_many_values_settles_it():
    for last, values, later, expected in ((1.4e-5, 1000, 1e-5, 1), (1.4e-5, 100, 1e-5, 4), (1.8e-5, 1000, 1.3e-5, 2)):
        errors = torch.linspace(0, 1e-5, values)
        errors[-1] = last
        assert off_by(errors, values, (1e-5, later)) == (True, expected)
    assert off_by(torch.linspace(0, 1.4e-5, 1000), 1000) == (True, 4)


def test_many_values_that_fail_by_the_largest_alone_are_asked_for_further_inputs():
    errors = torch.linspace(0, 1e-5, 1000)
    for last, passes in ((1.8e-5, True), (3.5e-5, False)):
        errors[-1] = last
        assert off_by(errors, 1000, (1e-5,) * 4 + (2e-5,)) == (passes, 12)
    assert off_by(torch.linspace(0, 1.8e-5, 1000), 1000) == (False, 4)


def test_a_brief_judgment_ends_at_a_certain_failure():
    model, x, calls = nn.Softplus(), torch.linspace(1, 2, 1000), []
    judge = Judge(model, ExampleCall((x,)), model(x), 1e-9)
    for briefly, expected in ((True, 4), (True, 5), (False, 9)):  # the first makes the variations
        result = judge(lambda call: calls.append(call) or model(call.args[0]) * 1.01, briefly)
        assert not result.passed and len(calls) == expected


def test_variations_that_the_model_does_not_take_are_left_out():
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0] != 1:
                raise ValueError("starts with another value")
            return x.exp()

    call = ExampleCall((torch.tensor([1.0, 2.0, 3.0]),))
    result = Judge(Picky(), call, Picky()(*call.args), 1e-6)(lambda call: call.args[0] * 2)
    assert not result.passed and dataclasses.is_dataclass(result)
