"""What a call allocates, and the memory of tensors of which some lie in others."""

import threading

import pytest
import torch

from kfconvert.profiling import allocation, bytes_of

KIB = 1024


def kibibytes(count):
    return torch.empty(count * KIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "peak", "kept"),
    [
        (lambda held: kibibytes(64), 64, 0),
        (lambda held: held.append(kibibytes(64)), 64, 64),
        (lambda held: (held.append(kibibytes(16)), kibibytes(32), kibibytes(8))[2], 56, 16),
        (lambda held: [kibibytes(32).numel() for _ in range(4)] and None, 32, 0),
        (lambda held: None, 0, 0),
    ],
)
def test_allocations_of_a_call(call, peak, kept):
    held = []
    found = allocation(lambda: call(held), torch.device("cpu"))
    assert 0 <= found.peak - peak * KIB < KIB and found.kept == kept * KIB


def test_other_threads_do_not_count():
    held = []

    def call():
        thread = threading.Thread(target=lambda: held.append(kibibytes(256)))
        thread.start()
        thread.join()

    assert allocation(call, torch.device("cpu")) == (0, 0) and held


def test_errors_pass_and_leave_no_profiler_behind():
    def fails():
        raise KeyError("own")

    with pytest.raises(KeyError):
        allocation(fails, torch.device("cpu"))
    assert allocation(lambda: None, torch.device("cpu")) == (0, 0)


def test_bytes_of_tensors_that_share_memory():
    base, other = torch.zeros(1024), torch.zeros(8)
    part = torch.from_dlpack(base[256:512])
    assert bytes_of([]) == 0
    assert bytes_of([part]) == 1024
    assert bytes_of([base, base[3:], part, other, other]) == 4096 + 32
    assert bytes_of([torch.ones(4, 4).to_sparse()]) == 64
    assert bytes_of([torch.nn.UninitializedParameter(), other]) == 32
