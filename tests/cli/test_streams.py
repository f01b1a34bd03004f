"""What the command writes where: results alone on stdout, one line where that fails, nothing that moves a cursor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import one_error, workplace  # noqa: F401  (a fixture)

from kfconvert.cli import command as cli
from kfconvert.cli import jobs, terminal

pytestmark = pytest.mark.usefixtures("workplace")

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


def test_json_is_all_there_is_on_stdout_whoever_else_writes(capfd, monkeypatch, tmp_path):
    (tmp_path / "cli_models.py").write_text(NOISE)
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))
    assert cli.main(["--models", "cli_models:net", "--json", "--device", "cpu", "--select", "all"]) == 0
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    (net,) = json.loads(out.removesuffix("after\n"))["models"]
    assert net["error"] is None and "\x1b" not in out
    for source in ("Python", "a descriptor", "a process", "C"):
        assert f"from {source}\n" in err


def test_a_process_whose_stdout_takes_nothing_says_so_in_one_line():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kfconvert", "--help"]
        finished = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert finished.returncode == 2
    assert finished.stderr == "kfconvert: error: cannot write the output: No space left on device\n"


def without_readers():
    ours, theirs = os.pipe()
    os.close(ours)
    return os.fdopen(theirs, "w")


@pytest.mark.parametrize(
    ("opened", "why"),
    [(lambda: open("/dev/full", "w"), "No space left on device"), (without_readers, "Broken pipe")],
    ids=["full", "no reader"],
)
@pytest.mark.parametrize("args", [["doctor"], ["--models", "cli_models:net", "--save-path", "out", "--device", "cpu"]])
def test_the_work_is_done_though_nobody_reads_the_report(capsys, monkeypatch, opened, why, args):
    stream = opened()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert cli.main(args) == 2
    with pytest.raises(OSError):
        stream.close()
    one_error(capsys, f"cannot write the output: {why}")
    assert os.listdir("out") == ["cli_models--net"] if "out" in args else not os.path.exists("out")


@pytest.mark.parametrize("name", ["a" * 300, "./" + "a" * 300, "~nobody/x", "/" * 5000, "a\0b"], ids=range(5))
def test_names_of_any_length_are_one_line(capsys, name):
    assert cli.main(["--models", name, "--save-path", "out"]) == 2
    one_error(capsys)


@pytest.mark.parametrize("path", ["", "a" * 300, "a\0b"], ids=range(3))
def test_save_paths_that_are_none(capsys, path):
    assert cli.main(["--models", "cli_models:net", "--save-path", path, "--device", "cpu"]) == 2
    one_error(capsys)


def test_control_characters_in_names_are_shown_not_obeyed(capsys):
    assert jobs.folder_name(f"pkg:{ESCAPE}make") == "pkg--31m--evil--make"
    assert cli.main(["--models", f"no_such:{ESCAPE}[/bold]", "--device", "cpu"]) == 2
    assert one_error(capsys, "\\x1b[31m\\x07\\u202eevil\\x9b") == ""


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
