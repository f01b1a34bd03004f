"""One model run in several ways: who fails, who is wrong, and what is told of the others."""

from functools import partial

import pytest
import torch
from torch import nn

from kfconvert.accuracy import reference_outputs
from kfconvert.inputs import ExampleCall
from kfconvert.profiling import COMPILED, EAGER, compare_candidates, compare_timings, compiled

CPU = torch.device("cpu")
CALL = ExampleCall((torch.ones(2, 4),))


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def compare(model, candidates):
    return compare_candidates(candidates, reference_outputs(model, CALL.args, {}), CPU, 0.01)


def test_each_candidate_is_prepared_checked_and_timed(model):
    calls = []

    def ready(name):
        return lambda: (lambda: (calls.append(name), CALL(model))[1], name)

    (eager, other), timings = compare(model, [(EAGER, ready("a")), ("other", ready("b"))])
    assert (eager.name, other.name, eager.details, other.details) == (EAGER, "other", "a", "b")
    assert list(timings) == [EAGER, "other"] and timings.baseline == EAGER and timings[EAGER].rounds >= 7
    assert eager.failure is other.failure is other.inaccurate is None and other.error == eager.error < 1e-6
    assert eager.prepare_s > 0 and eager.peak_bytes >= 2 * 2 * 4 * 4 and eager.extra_bytes is None
    assert min(calls.count(name) for name in "ab") >= timings[EAGER].rounds


def test_one_that_fails_or_is_wrong_does_not_stop_the_others(model):
    def fails():
        raise RuntimeError("no room\nand more of it")

    def breaks():
        assert found.pop()
        return CALL(model)

    found = [True]
    candidates = [
        (EAGER, lambda: (partial(CALL, model), None)),
        ("fails", fails),
        ("breaks", lambda: (breaks, None)),
        ("another shape", lambda: (lambda: torch.zeros(3), None)),
        ("far off", lambda: (lambda: CALL(model) + 1, None)),
        ("last", lambda: (partial(CALL, model), None)),
    ]
    results, timings = compare(model, candidates)
    assert list(timings) == [EAGER, "far off", "last"]
    failures = {each.name: each.failure for each in results if each.failure}
    assert failures["fails"] == "RuntimeError: no room" and "IndexError" in failures["breaks"]
    assert "wrong outputs: output has shape (3,)" in failures["another shape"]
    assert [each.name for each in results if each.inaccurate] == ["far off"]


def test_nothing_is_prepared_to_be_compared_with_what_cannot_run(model):
    prepared = []
    results, timings = compare(model, [(EAGER, lambda: 1 / 0), ("other", lambda: prepared.append(1))])
    assert timings is None and not prepared
    assert [(each.name, each.failure) for each in results] == [(EAGER, "ZeroDivisionError: division by zero")]


def test_the_reason_of_a_compiler_is_that_of_what_has_stopped_it(model, monkeypatch):
    def compile(model, mode):
        assert mode == "default"
        error = RuntimeError("backend='inductor' raised:")
        error.inner_exception = ValueError("there is no C++ compiler")
        raise error

    monkeypatch.setattr(torch, "compile", compile)
    candidates = [(EAGER, lambda: (partial(CALL, model), None)), (COMPILED, lambda: (compiled(model, CALL), None))]
    results, timings = compare(model, candidates)
    assert results[1].failure == "ValueError: there is no C++ compiler" and list(timings) == [EAGER]


def test_times_of_one_call():
    in_a_row = compare_timings({"a": lambda: None, "b": lambda: None}, budget_s=0.0, min_rounds=3)
    one = in_a_row.of_one_call(4)
    assert one.baseline == "a" and one["b"].median_ms == in_a_row["b"].median_ms / 4
    assert one.speedup("b") == in_a_row.speedup("b")
