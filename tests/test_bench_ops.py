"""scripts/bench_ops.py: its rows, its columns of bytes and errors, and that no operator is forgotten."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from kfconvert import ops
from kfconvert.ops.declaration import OPERATORS
from kfconvert.profiling import Comparison

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_ops")


def run(bench, monkeypatch, *arguments):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--device", "cpu", *arguments])
    return bench.main()


def test_rows_and_summary(bench, monkeypatch, capsys):
    only = "^(add_relu|quantize_int8, by channel)$"
    arguments = ("--dtype", "float32", "--sizes", "8x64,4x32", "--only", only, "--budget", "0.001")
    assert run(bench, monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    environment = r".* threads, float32, torch .*; a copy reaches 10 GB/s; `python bench_ops.py .*`"
    assert re.fullmatch(environment, lines[0])
    titles = "| operator | size | pass | eager us | kfconvert us | of a copy | error eager / kfconvert |"
    assert lines[2] == titles
    assert lines[3] == "|---|---|---|---:|---:|---:|---:|"
    rows = [line.strip("| ").split(" | ") for line in lines[4:] if line.startswith("|")]
    assert [row[:3] for row in rows] == [
        ["add_relu", "8 x 64", "forward"],
        ["add_relu", "8 x 64", "backward"],
        ["add_relu", "4 x 32", "forward"],
        ["add_relu", "4 x 32", "backward"],
        ["quantize_int8, by channel", "8 x 64", "forward"],
        ["quantize_int8, by channel", "4 x 32", "forward"],
    ]
    for row in rows:
        assert re.fullmatch(r"\d+\.\d\d \+-\d+%", row[3])
        assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d-\d+\.\d\d\)", row[4])
        assert re.fullmatch(r"\d+ %", row[5])
        assert re.fullmatch(r"\S+e-\d+ / \S+e-\d+|0\.0e\+00 / 0\.0e\+00|\d+ / \d+", row[6])
    assert re.match(r"\d of 6 rows slower than eager by time", lines[-1])


def test_a_variant_that_fails_costs_no_other_row(bench, monkeypatch, capsys):
    def broken(x, y):
        raise ValueError("not today")

    monkeypatch.setattr(ops, "add_relu", broken)
    only = ("--only", "add_relu|add_sigmoid", "--passes", "forward")
    assert run(bench, monkeypatch, "--sizes", "4x8", "--budget", "0.001", *only) == 1
    out = capsys.readouterr().out
    assert re.search(r"\| add_relu \| 4 x 8 \| forward \| \S+ \S+ \| - \| - \| \S+ / - \|\n", out)
    assert "add_relu 4 x 8 forward: kfconvert failed: ValueError: not today" in out
    assert re.search(r"\| add_sigmoid \| 4 x 8 \| forward \| \S+ \S+ \| \S+ \(\S+\) \|", out)


def test_triton_takes_part_in_the_forward(bench, monkeypatch, capsys):
    pytest.importorskip("triton")
    only = ("--only", "^add_relu$", "--columns", "eager,Triton")
    assert run(bench, monkeypatch, "--sizes", "4x8", "--budget", "0.001", *only) == 0
    out = capsys.readouterr().out  # on the CPU it fails, which is noted
    assert "add_relu 4 x 8 forward: Triton failed: RuntimeError: " in out and "backward: Triton" not in out


def test_an_operator_that_is_missing_is_left_out(bench, monkeypatch, capsys):
    monkeypatch.delattr(ops, "add_relu")
    assert run(bench, monkeypatch, "--sizes", "4x8", "--only", "add_relu") == 0
    captured = capsys.readouterr()
    assert captured.err == "add_relu: kfconvert.ops has no add_relu\n"
    assert "| add_relu" not in captured.out


def test_every_operator_has_a_case_or_a_reason(bench):
    timed = {case.operator for case in (*bench.CASES, *bench.COMPOSITIONS, *bench.DECLARED)}
    for name, operator in OPERATORS.items():
        reasons = (name in timed) + (operator.timed_as is not None)
        assert reasons == 1 or operator.runs is not None and not reasons, name


def test_an_operator_without_a_case_gets_that_of_its_declaration(bench, monkeypatch, capsys):
    compositions = importlib.import_module("bench_ops_compositions")
    case = compositions.of_declaration("add_relu", OPERATORS["add_relu"])
    assert (case.group, case.gradients) == ("elementwise", (0, 1))
    assert [tuple(x.shape) for x in case.inputs(bench.Maker(torch.device("cpu"), torch.float32), 8, 4)] == [(8, 4)] * 2
    gated = compositions.of_declaration("act_mul", OPERATORS["act_mul"])  # whose example has more than tensors
    inputs = gated.inputs(bench.Maker(torch.device("cpu"), torch.float32), 8, 4)
    torch.testing.assert_close(gated.of(ops)(*inputs), gated.plain(*inputs))


def test_bytes_that_must_move(bench):
    cases = {case.name: case for case in bench.CASES}
    make = bench.Maker(torch.device("cpu"), torch.float32)

    def moved(name, part):
        inputs = cases[name].inputs(make, 8, 16)
        with torch.set_grad_enabled(part != "forward"):
            grads = bench.gradients_of_outputs(cases[name], inputs)
            return bench.bytes_moved(cases[name], inputs, grads, part)

    array, row = 4 * 8 * 16, 4 * 16
    assert moved("add_relu", "forward") == 3 * array
    assert moved("add_relu", "backward") == 3 * array  # the output and its gradient read
    assert moved("mul_tanh", "backward") == 5 * array
    assert moved("bias_dropout_add", "backward") == 2 * array + row  # that of the residual is the output's
    assert moved("add_layer_norm", "forward") == 4 * array + 2 * row
    assert moved("add_layer_norm", "backward") == 4 * array + 3 * row


def test_table_and_summary_of_cuda(bench):
    table = importlib.import_module("bench_ops_table")
    variants = ["eager", "compile", "Liger", "kfconvert"]
    times = Comparison({"eager": [0.01] * 7, "compile": [0.002] * 7, "kfconvert": [0.004] * 7})
    errors = {"eager": "1e-7"}
    launched = Comparison({"eager": [0.02] * 7, "kfconvert": [0.01] * 7})
    row = bench.Row(bench.CASES[0], (5120, 1024), "forward", times, {"compile"}, launched, 0.85, errors)
    titles = table.header(variants, True).splitlines()[0]
    assert titles.count("|") == 11 and "| one by one us: eager / compile / kfconvert |" in titles
    assert table.line(row, variants, True) == (
        "| add_relu | 5120 x 1024 | forward | 10.00 +-0% | 2.00 +-0%* | - | 4.00 (4.00-4.00) | 85 % "
        "| 20.0 / - / 10.0 | 1e-7 / - |"
    )
    assert table.summary([row], True) == [
        "0 of 1 rows slower than eager by device time.",
        "0 of 1 rows slower than eager by time one by one.",
        "1 of 1 rows slower than compile by device time: add_relu 5120 x 1024 forward (x 0.50).",
        "1 of 1 elementwise and norm rows from 5 M elements on are below 90 % of a copy: "
        "add_relu 5120 x 1024 forward (85 %).",
    ]


def test_errors(bench):
    exact = [torch.tensor([1.0, 2.0], dtype=torch.float64)]
    assert bench.error_text([torch.tensor([1.0, 2.0])], [exact], exact[0].shape) == "0.0e+00"
    assert bench.error_text([torch.tensor([2.0, 2.0])], [exact], exact[0].shape) == "4.5e-01"
    dropped = [torch.zeros(2, dtype=torch.float64)]
    assert bench.error_text([torch.tensor([1.0, 0.0])], [exact, dropped], exact[0].shape) == "0.0e+00"
    codes = [torch.tensor([1, 2, 3], dtype=torch.int8)]
    assert bench.error_text([torch.tensor([1, 3, 4], dtype=torch.int8)], [codes], codes[0].shape) == "2"
