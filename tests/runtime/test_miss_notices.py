"""Whom a converted model tells of calls that run the original forward: ``on_miss`` and the logger ``kfconvert``."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
from support.smallest_net import Net, X

import kfconvert
from kfconvert import ConversionError, ModelConverter, auto_convert_model


def converted(on_miss):
    return ModelConverter(select="all", on_miss=on_miss).convert_model(Net(), example_inputs=X)


def missed(model, times=1):
    """The outputs of calls that no program serves, of one shape each."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [model(X[0]) for _ in range(times)]


def test_each_miss_is_told_once_with_the_reason_that_is_counted():
    told = []
    fused = converted(told.append)
    assert not told  # by the conversion itself
    with torch.no_grad():
        fused(X)
    missed(fused, 3)
    fused.train()
    missed(fused)
    misses = fused.kfconvert_info()["guard"]["misses"]
    assert len(told) == sum(misses.values()) == 4 and {reason: told.count(reason) for reason in told} == misses


def test_a_miss_is_counted_before_it_is_told():
    seen = []
    fused = auto_convert_model(
        Net(), example_inputs=X, select="all", on_miss=lambda reason: seen.append(fused.kfconvert_info()["guard"])
    )
    missed(fused)
    assert [sum(guard["misses"].values()) for guard in seen] == [1]


def test_an_error_of_it_is_warned_about_once_and_the_call_goes_on():
    def fails(reason):
        raise KeyError("no such counter")

    fused = converted(fails)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [fused(X[0]), fused(X[0])]
    (warning,) = (each for each in caught if "on_miss" in str(each.message))
    assert "on_miss of Net raised KeyError: 'no such counter'" in str(warning.message)
    assert warning.category is RuntimeWarning and warning.filename == __file__
    for output in outputs:
        torch.testing.assert_close(output, torch.relu(fused.linear(X[0])))


def test_an_interruption_ends_the_call():
    def interrupted(reason):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        missed(converted(interrupted))


def test_it_may_call_the_model():
    told = []

    def again(reason):
        told.append(reason)
        fused(X[0])

    fused = converted(again)
    missed(fused, 2)
    assert len(told) == 2 and sum(fused.kfconvert_info()["guard"]["misses"].values()) == 4


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_compilers_do_not_call_it():
    told = []
    fused = converted(told.append)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X[0]), torch.relu(fused.linear(X[0])))
        torch.jit.trace(fused, X[0], check_trace=False)  # whose check calls the model as it is
    assert not told


class Counter:
    def __init__(self):
        self.told = []

    def count(self, reason):
        self.told.append(reason)


def test_copies_tell_the_same_function_and_pickles_none():
    counter = Counter()
    fused = converted(counter.count)
    missed(copy.deepcopy(fused))
    assert len(counter.told) == 1
    missed(pickle.loads(pickle.dumps(converted(lambda reason: counter.told.append(reason)))))
    assert len(counter.told) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_warn_of_their_own_first_miss(copied):
    fused = converted(None)
    missed(fused)
    again = copied(fused)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="runs its original forward") as caught:
        again(X[0])
        again(X[0])
    assert len(caught) == 1


def test_a_loaded_model_tells_the_function_that_it_is_loaded_with(tmp_path):
    first, second = [], []
    path = kfconvert.save(converted(first.append), tmp_path / "net")
    missed(kfconvert.load(path, model=Net, on_miss=second.append))
    assert not first and len(second) == 1
    with pytest.raises(ConversionError, match="^on_miss must be a function of a reason, not 'count'$"):
        kfconvert.load(path, model=Net, on_miss="count")


def test_what_is_no_function_is_refused_before_the_work():
    with pytest.raises(ConversionError, match="^on_miss must be a function of a reason, not 3$"):
        ModelConverter(on_miss=3)


def test_the_logger_tells_each_reason_once(caplog):
    caplog.set_level(logging.INFO, "kfconvert")
    fused = converted(None)
    caplog.clear()
    missed(fused, 3)
    (record,) = caplog.records
    (reason,) = fused.kfconvert_info()["guard"]["misses"]
    assert record.getMessage() == f"Net runs its original forward: {reason}"
    assert record.levelno == logging.INFO and record.name.split(".")[0] == "kfconvert"
