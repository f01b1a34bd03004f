"""Whether two tensors have the same values, or differ by rounding only."""

import pytest
import torch

from kfconvert.accuracy import is_close, is_same_tensor

X = torch.tensor([1.0, float("nan"), float("inf")])
OTHERS = {
    "one element": torch.tensor([2.0, float("nan"), float("inf")]),
    "all elements": torch.tensor([2.0, 3.0, 4.0]),
    "no NaN": torch.tensor([1.0, 2.0, float("inf")]),
    "NaN elsewhere": torch.tensor([float("nan"), 1.0, float("inf")]),
    "shape": X[None],
    "dtype": X.double(),
    "layout": torch.tensor([1.0, 0.0, 2.0]).to_sparse(),
}


def test_the_same_values():
    assert is_same_tensor(X, X.clone()) and is_same_tensor(X[:0], X[:0].clone())
    assert is_same_tensor(torch.tensor([True]), torch.tensor([True]))
    sparse = torch.tensor([1.0, 0.0]).to_sparse()
    assert is_same_tensor(sparse, sparse.clone())


@pytest.mark.parametrize("name", OTHERS)
def test_other_values(name):
    assert not is_same_tensor(X, OTHERS[name]) and not is_same_tensor(OTHERS[name], X)


@pytest.mark.parametrize("value", [torch.tensor([-float("inf"), 100.0]), torch.tensor([1 + 50j, 100j]).conj()])
def test_values_that_differ_by_rounding(value):
    tolerances = {torch.float32: 1e-3}
    assert is_close(value, value + 0.05, tolerances)
    assert not is_close(value, value + 0.05, tolerances, share=0.1)
    assert not is_close(value, value + 0.5, tolerances)
    assert not is_close(value, -value, tolerances)


def test_numbers_and_other_dtypes_are_equal_or_differ():
    assert is_close(None, None, {}) and is_close(2, 2, {}) and not is_close(2, 2.0, {})
    assert is_close(torch.arange(3), torch.arange(3), {}) and not is_close(torch.arange(3), torch.arange(1, 4), {})
    assert not is_close(X, X.double(), {}) and not is_close(X, None, {})
