"""Two conversions side by side."""

import io
import json

import pytest
from rich.console import Console
from support import statistics as made
from support.selection import each_once

from kfconvert.report import comparison, render_comparison
from kfconvert.report.pairwise import MAX_SITES_SHOWN


def shown(first, second, width=80):
    stream = io.StringIO()
    found = comparison(first, second)
    json.dumps(found, allow_nan=False)
    Console(file=stream, width=width).print(render_comparison(("out/a", "out/b"), found))
    assert all(len(line.rstrip()) <= width for line in stream.getvalue().splitlines())
    return " ".join(stream.getvalue().split())


@pytest.fixture
def other():
    """Another conversion of the same model: a site more is fused, one in another way; it is faster and larger."""
    stats = made.statistics()
    stats["sites"][2].update(status="applied", strategy="onednn", reason=None)
    stats["sites"][1]["strategy"] = "aten"
    stats["total_replaced"] += 1
    stats["timings"] = made.timings(1.95, 1.1)
    stats["speedup_achieved"] = 1.95 / 1.1
    stats["memory"]["derived"] *= 2
    stats["accuracy"]["optimized_error"]["max_rel"] = 5.2e-6
    stats["generation"]["converted"]["tokens_per_s"] = 300.0
    stats["environment"]["threads"] = 8
    return stats


def test_what_differs_is_told(other):
    text = shown(made.statistics(), other)
    for fact in (
        "A out/a B out/b threads: A 1, B 8",
        "sites fused 10 11 +1",
        "original 1.90 ms 1.95 ms +3 %, within the spread",
        "converted 1.46 ms 1.10 ms -25 %",
        "speed-up 1.30 x 1.77 x +36 %",
        "tokens/s 260 300 +15 %",
        "accurate yes yes",
        "error 2.6e-07 5.2e-06 x 20",
        "weights 3.0 MiB 3.0 MiB",
        "derived 1.0 MiB 2.0 MiB +100 %",
        "2 sites have different decisions:",
        "merged_linear",
        "fused (kernel) fused (aten)",
    ):
        assert fact in text, fact
    sites = comparison(made.statistics(), other)["sites"]
    assert sites[1]["module"] == "encoder.layer.0.attention.output" and sites[1]["second"] == "fused (onednn)"
    assert sites[1]["first"] == "not fused: not faster: kernel takes 20.2 us, the original 18.3 us"


def test_times_alone_are_no_other_decision():
    again = made.statistics()
    again["sites"][2]["reason"] = "not faster: kernel takes 99.9 us, the original 18.0 us"
    found = comparison(made.statistics(), again)
    assert found["sites"] == [] and found["conditions"] == {} and found["overlap"] == ["original", "converted"]
    assert "All sites have the same decision" in shown(made.statistics(), again)


def test_options_that_differ_are_conditions():
    first, second = made.statistics(), made.statistics()
    first["config"] = {"select": "measured", "effort": "full", "modules": None}
    second["config"] = {"select": "all", "effort": "full", "modules": ["encoder.layer.0"] * 20}
    told = comparison(first, second)["conditions"]
    assert told == {"select": ["measured", "all"], "modules": [None, ["encoder.layer.0"] * 20]}
    text = shown(first, second)
    assert "select: A measured, B all" in text and "modules: A none, B ['encoder.layer.0'," in text and "[...]" in text


def test_sites_of_one_module_are_told_apart_by_their_order():
    first, second = made.statistics(), made.statistics()
    for stats, strategies in ((first, ("kernel", "aten")), (second, ("kernel", "kernel"))):
        stats["sites"] = [{**made.site("norm", "softmax"), "strategy": strategy} for strategy in strategies]
    (site,) = comparison(first, second)["sites"]
    assert (site["first"], site["second"]) == ("fused (aten)", "fused (kernel)")


def test_of_many_sites_the_first_are_shown_and_all_are_in_the_json():
    first, second = made.statistics(layers=30), made.statistics(layers=30)
    for site in second["sites"]:
        site.update(status="rejected", strategy=None, reason="[bold]slow[/bold]")
    applied = sum(site["status"] == "applied" for site in first["sites"])
    text = shown(first, second)
    assert f"{applied} sites have different decisions" in text and "[bold]slow" in text
    assert f"and {applied - MAX_SITES_SHOWN} more (--json lists all)" in text
    assert len(comparison(first, second)["sites"]) == applied


@each_once(first=made.KINDS, second=["nothing found", "old", "given back", "usual"])
def test_any_two_are_compared(first, second):
    assert "sites fused" in shown(made.KINDS[first](), made.KINDS[second]())


@pytest.mark.parametrize("number", [0.0, -1.0, 1e308, 1e-320, None])
def test_any_numbers_are_compared(other, number):
    for timing in other["timings"]["timings"].values():
        timing.update(median_ms=number or 0.0)
    other["accuracy"]["optimized_error"]["max_rel"] = other["speedup_achieved"] = number
    shown(made.statistics(), other)
    shown(other, made.statistics())
