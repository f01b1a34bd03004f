"""Files of tensors are those of safetensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.devices import DEVICES

from kfconvert.artifact.tensor_files import kind_of, write_tensors

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def storable(dtype):
    try:
        return bool(kind_of(dtype))
    except Exception:  # a quantized dtype, or one that safetensors does not have
        return False


def same_bytes(tensors, folder):
    save_file(tensors, folder / "theirs", metadata={"format": "pt"})
    write_tensors(tensors, folder / "ours")
    return (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


@pytest.mark.parametrize("dtype", filter(storable, DTYPES), ids=str)
def test_every_dtype_has_its_bytes(tmp_path, dtype):
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    assert same_bytes({"a": raw.view(dtype).reshape(3, 2)}, tmp_path)


def test_unusual_names_and_sizes(tmp_path):
    tensors = {
        'quoted " \\ \n é 漢': torch.randn(3), "empty": torch.empty(0, 4), "": torch.tensor(2.5), "b": torch.ones(5),
        "B": torch.ones(2, dtype=torch.bool), "a": torch.arange(3), "é": torch.randn(2, 0),
    }  # fmt: skip
    assert same_bytes(tensors, tmp_path)
    assert same_bytes({}, tmp_path)


def test_tensors_of_every_dtype_in_one_file(tmp_path):
    tensors = {str(dtype): torch.ones(3, dtype=torch.uint8).to(dtype) for dtype in DTYPES if storable(dtype)
               and "float4" not in str(dtype)}  # fmt: skip
    write_tensors(tensors, tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys() and len(found) > 12
    assert all(found[name].dtype is value.dtype and torch.equal(found[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("device", DEVICES)
def test_views_ties_and_conjugates_are_written_as_values(tmp_path, device):
    base = torch.randn(4, 6, device=device)
    values = torch.randn(3, dtype=torch.complex64, device=device)
    tensors = {
        "base": base, "tied": base, "turned": base.T, "strided": base[:, ::2], "conjugate": values.conj(),
        "negative": values.conj().imag, "parameter": torch.nn.Parameter(base[1:]), "expanded": base[:1].expand(3, 6),
    }  # fmt: skip
    write_tensors(tensors, tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(found[name], value.detach().cpu().resolve_conj().resolve_neg()), name


def test_a_full_disk_is_an_error():
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("the system has no such file")
    with pytest.raises(OSError, match="No space"):
        write_tensors({"a": torch.ones(3)}, full)
