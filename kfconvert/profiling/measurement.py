"""What is known of one function: how long a call takes, and what it moves, launches and allocates."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from .bandwidth import copy_bandwidth
from .comparison import median_interval

_FIELDS = {"mean_time": "mean_ms", "median_time": "median_ms", "std_time": "std_ms", "min_time": "min_ms"}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of one call in milliseconds, and the cost of a call.

    The statistics are over `repeat` measurements, each the mean over `calls` calls in a row. `std_ms` is the
    sample standard deviation of the measurements (0 of a single one). `low_ms` and `high_ms` bound the
    median, not the mean, with at least 95 % confidence (less below 6 measurements), see `median_interval`:
    times are skewed.

    device: where the calls computed, such as "cuda:0".
    bytes_moved: bytes that a call reads and writes at least, see `bytes_of_call`.
    launches: kernels that one call starts; None off CUDA, and where they could not be counted.
    peak_bytes: memory at the peak of a call beyond what was allocated before it, its outputs included; None
    off CUDA.
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
        """The statistics of `times_ms`; `cost` holds the remaining fields."""
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
        """A time of one call in seconds, by its usual name: "mean_time", "median_time", "std_time", "min_time"."""
        try:
            return getattr(self, _FIELDS[key]) / 1e3
        except KeyError:
            raise KeyError(f"{key!r} is none of {', '.join(_FIELDS)}") from None

    @property
    def bandwidth_gb_s(self) -> float:
        """`bytes_moved` over the median time, in GB/s (10^9 bytes a second)."""
        return self.bytes_moved / self.median_ms / 1e6

    @property
    def copy_gb_s(self) -> float | None:
        """What a copy reaches on `device`, see `copy_bandwidth`, which measures it when this is first asked for.

        None where that cannot be measured (there is no memory for it), or a call moves nothing.
        """
        try:
            return copy_bandwidth(self.device) if self.bytes_moved else None
        except (RuntimeError, ValueError):  # a model that fills the memory can still be timed
            return None

    @property
    def copy_share(self) -> float | None:
        """`bandwidth_gb_s` over `copy_gb_s`; above 1 where a cache holds the data, as no copy's does."""
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
        """One line for people."""
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
    """With microseconds below 1 ms: "4.31 us", "12.400 ms"."""
    return f"{1e3 * milliseconds:.2f} us" if milliseconds < 1 else f"{milliseconds:.3f} ms"


def bytes_text(count: int) -> str:
    """In the largest binary unit that it fills: "512 B", "4.0 MiB"."""
    unit = max((unit for unit in range(4) if count >= 1024**unit), default=0)
    return f"{count} B" if unit == 0 else f"{count / 1024**unit:.1f} {('KiB', 'MiB', 'GiB')[unit - 1]}"
