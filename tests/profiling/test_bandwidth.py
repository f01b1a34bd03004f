"""What a call has to move, and the copies it is compared with."""

import pytest
import torch

from kfconvert.inputs.example import ExampleCall
from kfconvert.profiling import bandwidth, copy_bandwidth
from kfconvert.profiling.bandwidth import bytes_of_call


def moved(fn, *args, **kwargs):
    call = ExampleCall(args, kwargs)
    return bytes_of_call(fn, call, call(fn))


def test_inputs_and_outputs_count_once_each():
    x, y = torch.ones(10), torch.ones(10, dtype=torch.float64)
    assert moved(torch.add, x, y) == 40 + 80 + 80
    assert moved(torch.mul, x, x) == 40 + 40  # read once
    assert moved(torch.add, x, other=2.5) == 40 + 40  # a number is no tensor
    assert moved(lambda pair: {"sum": [pair[0] + pair[1]]}, (x, y)) == 40 + 80 + 80
    assert moved(lambda: None) == 0


def test_what_is_written_in_place_is_read_and_written():
    assert moved(torch.relu_, torch.ones(10)) == 40 + 40


def test_an_expanded_dimension_is_in_memory_once():
    assert moved(torch.relu, torch.ones(10).expand(5, 10)) == 40 + 200  # the result is not expanded
    assert moved(torch.relu, torch.ones(0, 10)) == 0


def test_tensors_without_strides_do_not_count():
    sparse = torch.eye(3).to_sparse()
    assert moved(torch.mv, sparse, torch.ones(3)) == 12 + 12


def test_a_copy_reads_and_writes_and_the_best_round_counts(monkeypatch):
    times = iter([2.0, 1.0, 4.0, 3.0, 5.0])
    monkeypatch.setattr(bandwidth, "batch_ms", lambda copy, calls, device: next(times))
    assert copy_bandwidth("cpu") == pytest.approx(2 * 2**20 / 1e-3 / 1e9)


def test_nothing_is_moved_on_meta():
    with pytest.raises(ValueError, match="^copy_bandwidth: the meta device has no memory$"):
        copy_bandwidth("meta")


@pytest.mark.cuda
def test_copies_within_a_gpu(monkeypatch):
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 256 * 2**20)
    speed = copy_bandwidth("cuda")
    assert 10 < speed < 100_000  # GB/s: this tells the unit, not how fast the device is
    assert copy_bandwidth(torch.device("cuda", torch.cuda.current_device())) == speed
