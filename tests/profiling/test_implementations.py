"""Implementations against each other: agreement, speed-ups, the table and the chart."""

import builtins
import json
import math

import pytest
import torch
import torch.nn.functional as F

from kfconvert.profiling import KernelProfiler, compare_functions, implementations

QUICK = {"warmup": 0, "repeat": 6}


def plain(x):
    return F.gelu(x + 1)


def rounded(x):
    return F.gelu((x + 1) * (1 + 2e-7))


def wrong(x):
    return F.gelu(x + 1) * 1.5


def shorter(x):
    return F.gelu(x + 1)[:1]


@pytest.fixture
def x():
    return torch.randn(8, 16)


def test_rows_in_the_order_given(x):
    rows = KernelProfiler().compare_implementations({"plain": plain, "rounded": rounded}, x, **QUICK)
    assert [row.name for row in rows] == ["plain", "rounded"]
    assert rows[0].speedup is None and rows[1].speedup.ratio > 0
    assert [row.measurement.repeat for row in rows] == [6, 6]
    assert rows[0].measurement.bytes_moved == 2 * 512


def test_disagreement_is_reported_and_not_raised(x):
    functions = {"plain": plain, "rounded": rounded, "wrong": wrong, "shorter": shorter}
    same, close, off, cut = KernelProfiler().compare_implementations(functions, x, **QUICK)
    assert (same.agrees, same.difference, same.reason) == (True, 0.0, None)
    assert close.agrees and 0 < close.difference < 1e-6
    assert not off.agrees and off.difference == pytest.approx(0.5) and "first implementation" in off.reason
    assert not cut.agrees and cut.difference is None and "shape" in cut.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_few_units_of_rounding_agree(x, dtype):
    x = x.to(dtype)
    exact = compare_functions(plain, lambda x: F.gelu(x.double() + 1).to(dtype), x, **QUICK)
    assert exact.agrees and 0 < exact.difference < 4 * torch.finfo(dtype).eps


def test_integers_agree_where_they_are_equal(x):
    same = compare_functions(lambda x: x.argmax(), lambda x: x.flatten().argmax(), x, **QUICK)
    assert (same.agrees, same.difference) == (True, 0.0)
    other = compare_functions(lambda x: x.argmax(), lambda x: x.argmax() + 1, x, **QUICK)
    assert not other.agrees and other.difference is None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_outputs_are_compared_by_their_elements(layout):
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    same = compare_functions(torch.neg, torch.neg, x, **QUICK)
    assert (same.agrees, same.difference) == (True, 0.0)
    assert not compare_functions(torch.neg, lambda x: -x * 2, x, **QUICK).agrees


def test_inputs_and_random_numbers_are_the_same_for_each(x):
    before, state = x.clone(), torch.get_rng_state()
    assert compare_functions(F.relu, F.relu_, x, **QUICK).agrees  # the copy, not x, is written to first
    assert compare_functions(F.relu_, F.relu_, before, **QUICK).agrees
    assert torch.equal(torch.get_rng_state(), state)
    assert compare_functions(lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5), x, **QUICK).agrees


def test_results_are_kept_by_label(x):
    profiler = KernelProfiler()
    first = profiler.compare_implementations({"plain": plain}, x, **QUICK)
    profiler.compare_implementations({"plain": plain, "wrong": wrong}, x, **QUICK, label="again")
    assert list(profiler.results) == ["float32[8, 16]", "again"]
    assert profiler.results["float32[8, 16]"] is first
    second = profiler.compare_implementations({"plain": plain}, x, **QUICK)
    assert profiler.results["float32[8, 16]"] is second


def test_reports(x):
    profiler = KernelProfiler()
    functions = {"plain": plain, "[wrong]": wrong, "zero": torch.zeros_like}
    rows = profiler.compare_implementations(functions, x, **QUICK)
    report = json.loads(json.dumps([row.as_dict() for row in rows], allow_nan=False))
    assert report[0]["speedup"] is None and report[1]["speedup"]["ratio"] > 0
    assert report[1]["measurement"]["repeat"] == 6 and report[1]["agrees"] is False
    lines = [row.summary() for row in rows]
    assert "agree" not in lines[0] and "outputs do NOT agree" in lines[1] and "\n" not in "".join(lines)
    table = profiler.summary()
    assert "float32[8, 16]" in table and "[wrong]" in table and table.count("DIFFERS") == 2
    assert max(map(len, table.splitlines())) <= implementations.WIDTH


def test_where_nothing_can_be_compared_it_says_so(x):
    profiler = KernelProfiler()
    nothing = {name: lambda x: torch.full_like(x, math.nan) for name in ("one", "other")}
    row = profiler.compare_implementations(nothing, x, **QUICK)[1]
    assert row.agrees is None and "outputs could not be compared: " in row.summary()
    assert "not known" in profiler.summary() and "DIFFERS" not in profiler.summary()


def test_bad_arguments(x):
    profiler = KernelProfiler()
    with pytest.raises(ValueError, match="implementations must be a non-empty mapping"):
        profiler.compare_implementations([plain], x)
    with pytest.raises(TypeError, match="broken must be callable, not int"):
        profiler.compare_implementations({"plain": plain, "broken": 3}, x)
    with pytest.raises(TypeError, match="^pass either inputs or args, not both$"):
        compare_functions(torch.add, torch.add, x, args=(x, x))
    with pytest.raises(TypeError, match="^args must be a tuple of arguments, not Tensor$"):
        profiler.compare_implementations({"relu": torch.relu}, args=x)
    assert profiler.results == {}
    with pytest.raises(ValueError, match="nothing to plot"):
        profiler.plot_comparison()


def test_the_chart_is_a_png_and_names_in_it_are_no_formulas(x, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    shown, save = [], figure.savefig

    def saved(self, *args, **kwargs):
        shown.extend(text.get_text() for text in self.axes[0].get_legend().get_texts())
        shown.extend(text.get_text() for text in self.axes[0].get_xticklabels())
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure, "savefig", saved)
    profiler, names = KernelProfiler(), ["$x_{$", "_hidden", r"\$y$"]
    profiler.compare_implementations(dict.fromkeys(names, plain), x, **QUICK, label="$z_{$")
    path = profiler.plot_comparison(path=str(tmp_path / "chart.of.kernels"))
    assert shown == [*names, "$z_{$"] and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_positional_arguments_by_name(x):
    profiler = KernelProfiler()
    rows = profiler.compare_implementations({"add": torch.add, "sub": torch.sub}, args=(x, x * 0), **QUICK)
    assert [row.agrees for row in rows] == [True, True] and list(profiler.results) == ["float32[8, 16], float32[8, 16]"]
    assert compare_functions(torch.add, torch.sub, args=[x, x * 0], **QUICK).agrees


def test_a_chart_needs_matplotlib(x, tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    profiler = KernelProfiler()
    profiler.compare_implementations({"plain": plain}, x, **QUICK)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'kfconvert\[plot\]'"):
        profiler.plot_comparison(path=tmp_path / "chart.png")


@pytest.mark.cuda
def test_implementations_on_a_gpu():
    x = torch.randn(2048, 1024, device="cuda")
    fused, unfused = KernelProfiler().compare_implementations(
        {"addcmul": lambda x: torch.addcmul(x, x, x), "two": lambda x: x + x * x}, x, **QUICK
    )
    assert (fused.measurement.launches, unfused.measurement.launches) == (1, 2)
    assert fused.agrees and unfused.agrees and unfused.difference < 1e-6
    assert fused.measurement.device == str(x.device)
    assert fused.measurement.peak_bytes < unfused.measurement.peak_bytes
