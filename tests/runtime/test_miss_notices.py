"""Reports of calls that run the original forward: ``on_miss``, the warning, and the logger ``kfconvert``."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
from support.smallest_net import Net, X

import kfconvert
from kfconvert import ConversionError, auto_convert_model


def converted(on_miss):
    return auto_convert_model(Net(), example_inputs=X, select="all", effort="fast", on_miss=on_miss)


def missed(model, times=1):
    """The outputs of calls that no program serves, of one shape each."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [model(X[0]) for _ in range(times)]


def test_each_miss_is_reported_once_with_the_reason_that_is_counted():
    told, counted = [], []
    fused = converted(lambda reason: told.append(reason) or counted.append(sum(counts().values())))

    def counts():
        return fused.kfconvert_info()["guard"]["misses"]

    assert not told  # by the conversion itself
    with torch.no_grad():
        fused(X)
    missed(fused, 3)
    fused.train()
    missed(fused)
    assert {reason: told.count(reason) for reason in told} == counts() and counted == [1, 2, 3, 4]


def test_its_errors_are_those_of_the_call():
    def fails(reason):
        raise KeyError("no such counter")

    with pytest.raises(KeyError, match="no such counter"):
        missed(converted(fails))


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_compilers_do_not_call_it():
    told = []
    fused = converted(told.append)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X[0]), torch.relu(fused.linear(X[0])))
        torch.jit.trace(fused, X[0], check_trace=False)  # whose check calls the model as it is
    assert not told


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


def test_the_logger_tells_each_reason_once(caplog):
    caplog.set_level(logging.INFO, "kfconvert")
    fused = converted(None)
    caplog.clear()
    missed(fused, 3)
    (record,) = caplog.records
    (reason,) = fused.kfconvert_info()["guard"]["misses"]
    assert record.getMessage() == f"Net runs its original forward: {reason}"
    assert record.levelno == logging.INFO and record.name.split(".")[0] == "kfconvert"
