"""Fingerprints tell tensors apart of which a single element differs."""

import pytest
import torch

from kfconvert.runtime.state import fingerprint
from kfconvert.runtime.state.fingerprint import fingerprints

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


@pytest.fixture(params=["compiled", "python"], autouse=True)
def compiled_or_python(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(fingerprint, "_of_memory", None)
    elif fingerprint._of_memory is None:
        pytest.skip("kfconvert._C was not built for this Python")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_element_counts(dtype):
    tensor = torch.arange(24).to(dtype).view(4, 6)
    known = {fingerprints([tensor])[0]}
    for index in range(24):
        other = tensor.clone()
        other.view(-1)[index] = (not other.view(-1)[index]) if dtype is torch.bool else 77
        known.update(fingerprints([other]))
    assert len(known) == 25
    assert fingerprints([tensor.clone()]) == fingerprints([tensor.t().contiguous().t()]) == fingerprints([tensor])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_imaginary_parts_count(dtype):
    assert len(set(fingerprints(torch.tensor([1 + number * 1j], dtype=dtype) for number in range(5)))) == 5


def test_sparse_tensors_and_none():
    dense = torch.diag(torch.arange(1.0, 4.0))
    assert fingerprints([None, dense.to_sparse()]) == [0, *fingerprints([dense])]
