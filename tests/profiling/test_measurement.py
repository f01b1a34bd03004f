"""The statistics, and what is derived from them."""

import dataclasses
import json
import math
import statistics

import pytest

from kfconvert.profiling import Measurement
from kfconvert.profiling import measurement as measuring
from kfconvert.profiling.comparison import median_interval

COST = {"device": "cuda:0", "bytes_moved": 3_000_000, "launches": 1, "peak_bytes": 4 * 2**20}


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    monkeypatch.setattr(measuring, "copy_bandwidth", {"cuda:0": 2000.0}.__getitem__)


def test_statistics_of_the_times():
    times_ms = [float(n) for n in range(30, 0, -1)]
    measurement = Measurement.of(times_ms, 4, **COST)
    assert (measurement.mean_ms, measurement.median_ms, measurement.min_ms) == (15.5, 15.5, 1.0)
    assert measurement.std_ms == statistics.stdev(times_ms)
    # ranks 10 and 21 enclose the median of 30 with 95.7 % (binomial tables)
    assert (measurement.low_ms, measurement.high_ms) == (10.0, 21.0)
    assert (measurement.repeat, measurement.calls) == (30, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        measurement.repeat = 6


@pytest.mark.parametrize("count", [6, 7, 20, 71, 100, 400])
def test_the_interval_covers_the_median_with_95_per_cent(count):
    low, high = median_interval(range(count))
    # the median lies outside when at most `low` of the values are below it, or above it
    outside = 2 * sum(math.comb(count, below) for below in range(low + 1)) / 2**count
    assert high == count - 1 - low and 1 - outside >= 0.95


def test_bandwidth_and_its_share_of_a_copy():
    measurement = Measurement.of([0.001, 0.002, 0.009], 1, **COST)
    assert measurement.bandwidth_gb_s == pytest.approx(1500.0)  # 3 MB in 2 us
    assert measurement.copy_share == pytest.approx(0.75)
    idle = dataclasses.replace(measurement, bytes_moved=0)
    assert idle.copy_share is None and idle.copy_gb_s is None


def test_times_in_seconds_by_their_usual_names():
    measurement = Measurement.of([1.0, 2.0, 6.0], 1, device="cpu", bytes_moved=0, launches=None, peak_bytes=None)
    times = {name: measurement[f"{name}_time"] for name in ("mean", "median", "min", "std")}
    assert times == pytest.approx({"mean": 3e-3, "median": 2e-3, "min": 1e-3, "std": 7**0.5 * 1e-3})
    with pytest.raises(KeyError, match="'time' is not one of mean_time, median_time, std_time, min_time"):
        measurement["time"]


def test_report():
    measurement = Measurement.of([0.002] * 9, 100, **COST)
    report = json.loads(json.dumps(measurement.as_dict(), allow_nan=False))
    assert report["median_ms"] == 0.002 and report["launches"] == 1 and report["peak_bytes"] == 4 * 2**20
    assert report["bandwidth_gb_s"] == pytest.approx(1500.0) and report["copy_share"] == pytest.approx(0.75)
    assert report["copy_gb_s"] == 2000.0
    line = measurement.summary()
    assert "\n" not in line and line.startswith("2.00 us") and "1.5e+03 GB/s (75 % of a copy)" in line
    assert "1 launch," in line and line.endswith("peak memory 4.0 MiB")
    elsewhere = dataclasses.replace(measurement, launches=None, peak_bytes=None, bytes_moved=0).summary()
    assert not any(word in elsewhere for word in ("launch", "peak", "GB/s"))
