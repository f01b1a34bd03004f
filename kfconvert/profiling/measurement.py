"""The measurement of a function: time, memory traffic, kernel launches and allocations of a call."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from .bandwidth import copy_bandwidth
from .comparison import median_interval

_FIELDS = {"mean_time": "mean_ms", "median_time": "median_ms", "std_time": "std_ms", "min_time": "min_ms"}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The time of a call in milliseconds, and its other costs.

    The statistics are over `repeat` measurements, each the mean of `calls` consecutive calls. `std_ms` is the sample
    standard deviation of the measurements (0 for a single one). `low_ms` and `high_ms` bound the median with at least
    95 % confidence (less below 6 measurements), see `median_interval`. They do not bound the mean, because times are
    skewed.

    device: device of the calls, such as "cuda:0".
    bytes_moved: lower bound of the bytes that a call reads and writes, see `bytes_of_call`.
    launches: kernels that a call launches; None on other devices than CUDA, or if they could not be counted.
    peak_bytes: peak memory of a call, including its outputs, beyond the memory before it; None on other devices.
    """

    mean_ms: float
    median_ms: float
    std_ms: float
    min_ms: float
    low_ms: float
    high_ms: float
    repeat: int
    calls: int
    device: str
    bytes_moved: int
    launches: int | None
    peak_bytes: int | None

    @classmethod
    def of(cls, times_ms: Sequence[float], calls: int, **cost: Any) -> "Measurement":
        """Computes the statistics of `times_ms`; `cost` has the other fields."""
        ordered = sorted(times_ms)
        low, high = median_interval(ordered)
        return cls(
            mean_ms=statistics.fmean(ordered),
            median_ms=statistics.median(ordered),
            std_ms=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
            min_ms=ordered[0],
            low_ms=low,
            high_ms=high,
            repeat=len(ordered),
            calls=calls,
            **cost,
        )

    def __getitem__(self, key: str) -> float:
        """Returns a time of one call in seconds: "mean_time", "median_time", "std_time" or "min_time"."""
        try:
            return getattr(self, _FIELDS[key]) / 1e3
        except KeyError:
            raise KeyError(f"{key!r} is not one of {', '.join(_FIELDS)}") from None

    @property
    def bandwidth_gb_s(self) -> float:
        """Returns `bytes_moved` divided by the median time, in GB/s (10^9 bytes per second)."""
        return self.bytes_moved / self.median_ms / 1e6

    @property
    def copy_gb_s(self) -> float | None:
        """Returns the bandwidth of a copy on `device` in GB/s, see `copy_bandwidth`, which measures it on first use.

        Returns None if it cannot be measured (out of memory), or if a call moves no bytes.
        """
        try:
            return copy_bandwidth(self.device) if self.bytes_moved else None
        except (RuntimeError, ValueError):  # a model that fills the memory can still be timed
            return None

    @property
    def copy_share(self) -> float | None:
        """Returns `bandwidth_gb_s` divided by `copy_gb_s`; above 1 if the data fits in a cache."""
        copy_gb_s = self.copy_gb_s
        return None if copy_gb_s is None else self.bandwidth_gb_s / copy_gb_s

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "bandwidth_gb_s": self.bandwidth_gb_s,
            "copy_gb_s": self.copy_gb_s,
            "copy_share": self.copy_share,
        }

    def summary(self) -> str:
        """Returns the measurement as one line of text."""
        parts = [
            f"{time_text(self.median_ms)} (95 % between {time_text(self.low_ms)} and "
            f"{time_text(self.high_ms)}, {self.repeat} x {self.calls} calls)"
        ]
        if self.bytes_moved:
            share = self.copy_share
            of_copy = "" if share is None else f" ({100 * share:.0f} % of a copy)"
            parts.append(f"{self.bandwidth_gb_s:.3g} GB/s{of_copy}")
        if self.launches is not None:
            parts.append("1 launch" if self.launches == 1 else f"{self.launches} launches")
        if self.peak_bytes is not None:
            parts.append(f"peak memory {bytes_text(self.peak_bytes)}")
        return ", ".join(parts)


def time_text(milliseconds: float) -> str:
    """Formats a time, in microseconds below 1 ms: "4.31 us", "12.400 ms"."""
    return f"{1e3 * milliseconds:.2f} us" if milliseconds < 1 else f"{milliseconds:.3f} ms"


def bytes_text(count: int) -> str:
    """Formats bytes in the largest suitable binary unit: "512 B", "4.0 MiB"."""
    unit = max((unit for unit in range(4) if count >= 1024**unit), default=0)
    return f"{count} B" if unit == 0 else f"{count / 1024**unit:.1f} {('KiB', 'MiB', 'GiB')[unit - 1]}"
