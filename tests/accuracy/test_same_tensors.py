"""Whether two tensors hold the same."""

import pytest
import torch

from kfconvert.accuracy import is_same_tensor

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
