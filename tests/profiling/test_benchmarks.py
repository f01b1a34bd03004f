"""Measurements of functions: which calls are made, and what is reported of them. No test asserts a time."""

import pytest
import torch
from torch import nn

from kfconvert.profiling import (
    Measurement,
    benchmark_kernel,
    benchmarks,
    device_cost,
    profile_model_inference,
    quick_benchmark,
    sampling,
)
from kfconvert.profiling import measurement as measuring


def test_every_measurement_on_the_cpu_is_one_call():
    calls = []
    measurement = benchmark_kernel(lambda x: calls.append(x), torch.ones(3), warmup=2, repeat=5)
    assert isinstance(measurement, Measurement) and (measurement.repeat, measurement.calls) == (5, 1)
    assert len(calls) == 1 + 2 + 5  # a first one, warm-up, the timed ones
    assert measurement.device == "cpu" and measurement.launches is None and measurement.peak_bytes is None
    assert 0 < measurement.min_ms <= measurement.low_ms <= measurement.median_ms <= measurement.high_ms


def test_positional_arguments_by_name():
    seen = []
    benchmark_kernel(lambda *args: seen.append(args), args=(1, torch.ones(2)), warmup=0, repeat=1)
    assert all(args[0] == 1 and torch.equal(args[1], torch.ones(2)) for args in seen) and seen
    benchmark_kernel(lambda: seen.append(()), args=(), warmup=0, repeat=1)
    assert seen[-1] == ()


def test_bytes_of_the_call_unless_they_are_given():
    x = torch.ones(256)
    assert benchmark_kernel(torch.relu, x, 0, 1).bytes_moved == 2048
    given = benchmark_kernel(torch.relu, x, 0, 1, bytes_moved=5000)
    assert given.bytes_moved == 5000
    assert benchmark_kernel(nn.Linear(4, 2), torch.ones(1, 4), 0, 1).bytes_moved == 16 + 32 + 8 + 8


def test_nothing_is_copied_before_a_share_is_asked_for(monkeypatch):
    copies = []
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda device: copies.append(device) or 7.0)
    idle = benchmark_kernel(lambda: None, (), 0, 1)
    assert (idle.bandwidth_gb_s, idle.copy_gb_s) == (0.0, None) and "GB/s" not in idle.summary()
    busy = benchmark_kernel(torch.relu, torch.ones(4), 0, 1)
    assert busy.bandwidth_gb_s > 0 and copies == []
    assert busy.copy_gb_s == 7.0 and copies == ["cpu"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # of a GPU, of the CPU
def test_without_memory_for_a_copy_there_is_no_share(monkeypatch, error):
    def full(*_, **__):
        raise error("full")

    busy = benchmark_kernel(torch.relu, torch.ones(4), 0, 1)
    monkeypatch.setattr(torch, "ones", full)
    assert busy.copy_share is None and busy.as_dict()["copy_gb_s"] is None and busy.bandwidth_gb_s > 0
    assert "GB/s" in busy.summary() and "of a copy" not in busy.summary()


def test_meta_tensors():
    traced = benchmark_kernel(torch.relu, torch.ones(4, device="meta"), 0, 1)
    assert (traced.device, traced.bytes_moved, traced.copy_share) == ("meta", 32, None)


def test_quick_benchmark_takes_the_arguments_of_the_call():
    seen = []
    quick = quick_benchmark(lambda x, dim, fn: seen.append((x, dim, fn)), 1, dim=-1, fn=3)
    assert quick.repeat == benchmarks.QUICK_REPEAT and set(seen) == {(1, -1, 3)}


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((torch.relu, torch.ones(1), -1, 1), ValueError, "warmup must be at least 0, got -1"),
        ((torch.relu, torch.ones(1), 0, 0), ValueError, "repeat must be at least 1, got 0"),
        ((torch.relu, 3), TypeError, "inputs must be a tensor, a tuple .* not int"),
        ((torch.ones(1), torch.relu), TypeError, "fn must be callable, not Tensor"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words) as raised:
        benchmark_kernel(*arguments)
    assert "\n" not in str(raised.value)


def test_functions_take_turns_in_alternating_order():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = sampling.sample(functions, torch.device("cpu"), warmup=1, repeat=4)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc" + "cba"
    assert [len(times_ms) for times_ms, _ in samples.values()] == [4, 4, 4]


def test_launches_are_counted_again_where_the_profiler_lost_some(monkeypatch):
    sessions = iter([["gelu", "fence"], ["gelu", "gelu", "fence"], ["fence", "gelu", "gelu", "fence"]])
    pauses = []
    monkeypatch.setattr(device_cost, "_kernels", lambda call, device, pause_s: pauses.append(pause_s) or next(sessions))
    assert device_cost.count_launches(lambda: None, torch.device("cuda")) == 2
    assert tuple(pauses) == device_cost.PAUSES_S


@pytest.mark.parametrize("names", [[], ["fence"], ["gelu", "fence"]])
def test_launches_that_cannot_be_counted_are_none(monkeypatch, names):
    monkeypatch.setattr(device_cost, "_kernels", lambda call, device, pause_s: names)
    assert device_cost.count_launches(lambda: None, torch.device("cuda")) is None


class Watched(nn.Module):
    """Notes in which mode each forward runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.seen = []

    def forward(self, x, scale=1.0):
        self.seen.append((self.training, torch.is_grad_enabled()))
        return {"out": torch.rand(()) * self.frozen(self.linear(x)) * scale}


def test_evaluation_mode_without_gradients_and_all_is_put_back():
    model, state = Watched(), torch.get_rng_state()
    measurement = profile_model_inference(model, torch.ones(2, 4), warmup=1, repeat=3)
    assert model.seen == [(False, False)] * 5 and measurement.repeat == 3
    assert model.training and model.linear.training and not model.frozen.training
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


def test_parameters_buffers_inputs_and_outputs_are_moved():
    inputs = {"x": torch.ones(2, 4), "scale": 2.0}
    measurement = profile_model_inference(Watched(), inputs, warmup=0, repeat=1)
    parameters = (16 + 4 + 4 + 4) * 4
    buffers = (4 + 4) * 4 + 8
    assert measurement.bytes_moved == parameters + buffers + 32 + 32


def test_a_model_that_fails_is_put_back_and_a_function_is_no_model():
    model = Watched()
    with pytest.raises(RuntimeError):
        profile_model_inference(model, torch.ones(2, 3))
    assert model.training and not model.frozen.training
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not builtin_function_or_method"):
        profile_model_inference(torch.relu, torch.ones(1))


@pytest.mark.cuda
@pytest.mark.parametrize("batch_ms, size", [(1e-6, 1), (1e9, sampling.MAX_CALLS)])
def test_batches_on_a_gpu(monkeypatch, batch_ms, size):
    monkeypatch.setattr(sampling, "BATCH_MS", batch_ms)
    x, calls = torch.randn(64, 64, device="cuda"), []

    def product():
        calls.append(1)
        return x @ x

    measurement = benchmark_kernel(product, (), warmup=2, repeat=3)
    assert measurement.device == f"cuda:{torch.cuda.current_device()}"  # that of the outputs
    assert (measurement.repeat, measurement.calls) == (3, size)
    # the first, warm-up, one for the size of a batch, the batches, one for the memory, some for the launches
    assert len(calls) >= 1 + 2 + 1 + 3 * size + 1 + 1


@pytest.mark.cuda
@pytest.mark.parametrize(
    "fn, launches",
    [
        (lambda x: x + 1, 1),
        (lambda x: torch.relu(x + 1) * x, 3),
        (lambda x: x.view(-1), 0),
        (lambda x: x.cpu(), 0),  # a transfer is no kernel
    ],
)
def test_launches(fn, launches):
    x = torch.randn(1024, 1024, device="cuda")
    assert benchmark_kernel(fn, x, warmup=1, repeat=2).launches == launches


@pytest.mark.cuda
def test_launches_on_another_stream_and_under_annotations():
    x, stream = torch.randn(1024, device="cuda"), torch.cuda.Stream()

    def aside(x):
        with torch.profiler.record_function("aside"), torch.cuda.stream(stream):
            return x + 1

    stream.wait_stream(torch.cuda.current_stream())
    assert benchmark_kernel(aside, x, warmup=1, repeat=2).launches == 1


@pytest.mark.cuda
def test_peak_memory():
    x = torch.randn(2**20, device="cuda")
    torch.cuda.empty_cache()
    # The allocator may hand out a block that is up to 1 MiB larger than what was asked for.
    one = benchmark_kernel(lambda x: x + 1, x, warmup=1, repeat=2).peak_bytes
    assert 4 * 2**20 <= one <= 5 * 2**20
    two = benchmark_kernel(lambda x: (x + 1) * 2, x, warmup=1, repeat=2).peak_bytes
    assert 8 * 2**20 <= two <= 10 * 2**20
    assert benchmark_kernel(torch.relu_, x, warmup=1, repeat=2).peak_bytes == 0
