"""The one measure of "as accurate": against float64, relative to the error of plain ATen in the same dtype."""

import torch

# In float64 plain ATen is the truth that we compare with, and its own rounding errors count as ours.
FLOAT64_ULPS = 16


def assert_as_accurate(actual, plain, exact, factor=1.5, slack=0.0, ulps=1.0, summand=0.0):
    """The largest error of ``actual``, and the root mean square of its errors, are at most ``factor`` times those of
    ``plain``, but for ``ulps`` units in the last place of the largest value.

    ``exact`` is in float64; if ``actual`` is in float64 as well, only the largest error counts. Shapes, dtypes, devices
    and the places of NaN and infinities must be those of ``plain``. ``slack`` is what is allowed on top, relative to
    the largest true value. Of two numbers, a ``factor`` or ``ulps``, the first is for the largest error, the other for
    the mean. ``summand``: the size of numbers whose rounding errors stay where their sum cancels; it counts as a true
    value.
    """
    assert actual.shape == plain.shape == exact.shape
    assert actual.dtype == plain.dtype and actual.device == plain.device
    if actual.numel() == 0:
        return
    finite = exact.isfinite() & plain.isfinite()
    torch.testing.assert_close(actual.double()[~finite], plain.double()[~finite], equal_nan=True)
    if not finite.any():
        return
    exact = exact[finite]
    errors, allowed = ((each[finite].double() - exact).abs() for each in (actual, plain))
    largest = max(exact.abs().max().item(), summand)
    ulp = torch.finfo(actual.dtype).eps * max(largest, torch.finfo(actual.dtype).tiny)
    (of_largest, of_mean), (ulps_of_largest, ulps_of_mean) = _pair(factor), _pair(ulps)
    if actual.dtype == torch.float64:
        _assert_at_most(errors.max(), allowed.max(), of_largest, FLOAT64_ULPS * ulp + slack * largest)
        return
    _assert_at_most(errors.max(), allowed.max(), of_largest, ulps_of_largest * ulp + slack * largest)
    errors, allowed = _root_mean_square(errors), _root_mean_square(allowed)
    _assert_at_most(errors, allowed, of_mean, ulps_of_mean * ulp + slack * largest)


def _pair(value):
    return value if isinstance(value, tuple) else (value, value)


def _root_mean_square(errors):
    return errors.square().mean().sqrt()


def _assert_at_most(error, plain, factor, slack):
    assert error <= factor * plain + slack, f"error {error:.3e}, plain ATen {plain:.3e}, slack {slack:.3e}"
