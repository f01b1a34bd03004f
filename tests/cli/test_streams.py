"""What the command writes where: results alone on stdout, one line where that fails, nothing that moves a cursor."""

import ctypes
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import leftovers, one_error, workplace  # noqa: F401  (a fixture)

from kfconvert.cli import command as cli
from kfconvert.cli import jobs, messages, streams, terminal

ESCAPE = "\x1b[31m\x07\u202eevil\x9b\r\n\x7f"

NOISE = """
import ctypes, os, subprocess, sys
import torch
from torch import nn

libc = ctypes.CDLL(None)

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a\\x1b[31m", nn.Linear(4, 4))

    def forward(self, x):
        libc.puts(b"from C")  # in a buffer that is written at the end of the process
        return torch.relu(self._modules["a\\x1b[31m"](x))

def net():
    print("from Python")
    os.write(1, b"from a descriptor\\n")
    subprocess.run(["echo", "from a process"])
    return Noisy(), torch.randn(2, 4)
"""


def run(*args, **options) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kfconvert", *args]
    return subprocess.run(command, text=True, timeout=300, env=environment, stderr=subprocess.PIPE, **options)


@pytest.mark.exhaustive
def test_json_is_all_there_is_on_stdout_whoever_else_writes(tmp_path):
    (tmp_path / "noise.py").write_text(NOISE)
    finished = run("--models", "noise:net", "--json", "--device", "cpu", stdout=subprocess.PIPE, cwd=tmp_path)
    (net,) = json.loads(finished.stdout)["models"]
    assert finished.returncode == 0 and net["error"] is None, finished.stderr
    for source in ("Python", "a descriptor", "a process", "C"):
        assert f"from {source}\n" in finished.stderr
    assert "\x1b" not in finished.stdout


def failing(kind: str):
    """(options of the process, what is to be closed afterwards) for a stdout that takes nothing."""
    if kind == "full":
        full = open("/dev/full", "w")
        return {"stdout": full}, full
    if kind == "closed":
        return {"preexec_fn": lambda: os.close(1)}, io.StringIO()
    ours, theirs = os.pipe()
    os.close(ours)
    return {"stdout": theirs}, os.fdopen(theirs, "w")


@pytest.mark.parametrize(
    ("kind", "why"), [("full", "No space left on device"), ("closed", "it is closed"), ("no reader", "Broken pipe")]
)
@pytest.mark.parametrize("args", [["--help"], ["explain", "--help"]], ids=" ".join)
def test_a_stdout_that_takes_nothing_is_one_line_and_exit_code_2(kind, why, args):
    options, stream = failing(kind)
    with stream:
        finished = run(*args, **options)
    assert finished.returncode == 2
    assert finished.stderr == f"kfconvert: error: cannot write the output: {why}\n"


def test_a_closed_stdout_is_told_before_the_work():
    finished = run("--models", "no_such_module:make", preexec_fn=lambda: os.close(1))
    assert finished.stderr == "kfconvert: error: cannot write the output: it is closed\n"


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_leaves_the_exit_code(redirect):
    command = f'"{sys.executable}" -m kfconvert --models "" {redirect}'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    finished = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2 and finished.stdout == ""


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("args", [["--list-models"], ["--version"], ["doctor"], ["explain", "cli_models:net"]])
def test_every_report_to_a_full_stdout_is_one_line(capsys, monkeypatch, args):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(args) == 2
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()
    one_error(capsys, "cannot write the output: No space left on device")


def test_models_are_converted_and_saved_though_nobody_reads_the_report(capsys, workplace, monkeypatch):  # noqa: F811
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["--models", "cli_models:net", "--save-path", "out", "--device", "cpu"]) == 2
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)
        with pytest.raises(OSError):
            full.close()
    one_error(capsys, "cannot write the output: No space left on device")
    assert os.listdir("out") == ["cli_models--net"]


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "name",
    [
        *("a" * 300, "./" + "a" * 300, "a" * 300 + "/" + "b" * 300, "timm:" + "a" * 300),
        *("~nobody/x", "/" * 5000, "a\0b", "ü" * 300),
    ],
    ids=range(8),
)
def test_names_of_any_length_are_one_line(capsys, name):
    for args in (["--models", name, "--save-path", "out"], ["explain", name]):
        assert cli.main(args) == 2
        one_error(capsys)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "path", ["", " ", "a" * 300, "~nobody" * 100, "/".join(["a" * 200] * 50), "a\0b"], ids=range(6)
)
def test_save_paths_that_are_none(capsys, path):
    assert cli.main(["--models", "cli_models:net", "--save-path", path, "--device", "cpu"]) == 2
    one_error(capsys)


def test_a_long_name_has_a_folder_of_its_own():
    folders = {jobs.folder_name(f"{'ü' * 300}:{index}") for index in range(3)}
    assert len(folders) == 3 and all(len(folder.encode()) < 255 for folder in folders)
    assert jobs.folder_name("\udcff" * 300) == "model"


@pytest.mark.usefixtures("workplace")
def test_control_characters_in_names_are_shown_not_obeyed(capsys):
    (folder,) = {jobs.folder_name(f"pkg:{ESCAPE}make")}
    assert folder == "pkg--31m--evil--make"
    assert cli.main(["--models", f"no_such:{ESCAPE}[/bold]", "--device", "cpu"]) == 2
    line = one_error(capsys, "\\x1b[31m\\x07\\u202eevil\\x9b")
    out, err = capsys.readouterr()
    assert all(text.isprintable() for text in (line + out + err).splitlines())


@pytest.mark.usefixtures("workplace")
def test_control_characters_that_a_model_brings_are_shown_not_obeyed(capsys, tmp_path):
    (tmp_path / "cli_models.py").write_text(NOISE)
    for args in (["--models", "cli_models:net", "--device", "cpu"], ["explain", "cli_models:net", "--device", "cpu"]):
        assert cli.main(args) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and all(line.isprintable() for line in out.splitlines())
    assert "a\\x1b[31m" in out


def test_a_progress_bar_takes_any_name(monkeypatch, capsys):
    monkeypatch.setattr(terminal.Console, "is_terminal", True)
    with terminal.progress_bar(f"[/bold]{ESCAPE}") as progress:
        progress("load", 0, 1)
    assert "\x07" not in capsys.readouterr().err


def test_printable():
    given, told = {"a\n": ["\t", 1, None, ("é ß 漢 \u00a0",)]}, {"a\\n": ["\\t", 1, None, ["é ß 漢 \u00a0"]]}
    assert messages.printable(given) == told
    assert messages.in_one_line(" a\n\tb\x00 \udcff") == "a b\\x00 \\udcff"


def test_an_error_that_nobody_foresaw_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda: {}["surprise"])
    assert cli.main(["--version"]) == 2
    one_error(capsys, "unexpected KeyError at", "surprise")


def test_the_descriptor_is_given_back(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))
    with streams.results() as results:
        results.write("result\n")
        os.write(1, b"noise\n")
        ctypes.CDLL(None).puts(b"noise of C")
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out == "result\nafter\n" and sorted(err.splitlines()) == ["noise", "noise of C"]
