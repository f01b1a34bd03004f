"""Several models at a time: ``--jobs``, by each engine."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from test_cli import workplace  # noqa: F401  (a fixture)

from kfconvert.cli import command as cli
from kfconvert.cli import jobs
from kfconvert.cli.workers import Lost, Processes, run_tasks

ROOT = Path(__file__).parents[2]
# Tasks for processes, which print their process and what they do.
TASKS = """
import os, signal, sys, time
from kfconvert.cli.workers import Processes, run_tasks

def work(task, slot):
    print("noise")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "ended":
        os.kill(os.getpid(), signal.SIGTERM)
    if task == "exits":
        os._exit(3)
    if task == "endless":
        sys.stderr.write(f"{os.getpid()}\\n")
        time.sleep(600)
    return task, slot, os.getpid(), "long" * 99999

if __name__ == "__main__":
    import cli_tasks
    run_tasks(Processes(), cli_tasks.work, ["endless"] * 2, 2, print)
"""
MORE_MODELS = """
import os, signal
from cli_models import net, other

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    (tmp_path / "cli_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cli_tasks", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    import cli_tasks

    return cli_tasks


def test_each_task_has_a_process_and_one_that_dies_takes_no_other_along(tasks, capfd):
    results = {}
    names = ["a", "killed", "b", "ended", "exits", "c"]
    run_tasks(Processes(), tasks.work, names, 2, results.__setitem__)
    lived = {task: result for task, result in results.items() if not isinstance(result, Lost)}
    assert {task: result[0] for task, result in lived.items()} == {"a": "a", "b": "b", "c": "c"}
    assert {slot for _, slot, *_ in lived.values()} <= {0, 1} and len(lived["a"][3]) == 4 * 99999
    assert len({pid for *_, pid, _ in lived.values()} | {os.getpid()}) == 4
    assert {task: result.reason for task, result in results.items() if isinstance(result, Lost)} == {
        "killed": "its process was killed, possibly because memory ran out",
        "ended": "its process was ended by SIGTERM",
        "exits": "its process ended with the exit code 3",
    }
    out, err = capfd.readouterr()
    assert out == "" and set(err.split()) == {"noise"}


def test_what_is_raised_while_others_run_ends_them(tasks):
    def done(task, result):
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(Processes(), tasks.work, ["a", "endless", "never"], 2, done)
    assert multiprocessing.active_children() == [] and time.monotonic() - began < 60


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(tasks, tmp_path, how):
    command = [sys.executable, str(tmp_path / "cli_tasks.py")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    pids = []
    while len(pids) < 2:
        line = process.stderr.readline().strip()
        pids += [int(line)] if line.isdecimal() else []
    process.send_signal(how)
    process.communicate(timeout=120)  # which waits for whoever else has its stderr
    deadline = time.monotonic() + 60
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:  # until init has seen it end
                os.kill(pid, 0)
                time.sleep(0.05)


@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=pytest.mark.heavy)])
def test_results_come_as_they_are_ready_and_a_process_that_is_killed_is_one_line(
    workplace,  # noqa: F811
    capfd,
    monkeypatch,
    engine,
):
    if engine == "ray":
        pytest.importorskip("ray")
    (workplace / "more_models.py").write_text(MORE_MODELS)
    saved = workplace / "out" / "more_models--other"
    saved.mkdir(parents=True)
    (saved / "kfconvert.json").touch()
    names = ["more_models:net", "more_models:killed", "more_models:other"]
    options = ["--json-lines", "--select", "all", "--save-path", "out", "--skip-existing", "--engine", engine]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(workplace)]))
    code = cli.main(["convert", *names, *options, "--jobs", "2", "--device", "cpu"])
    out, err = capfd.readouterr()
    *lines, counts = map(json.loads, out.splitlines())
    results = {line["name"]: line for line in lines}
    assert code == 2 and set(results) == set(names), err
    assert results["more_models:net"]["saved"] == "out/more_models--net"
    assert results["more_models:net"]["statistics"]["environment"]["threads"] == max(1, torch.get_num_threads() // 2)
    assert results["more_models:other"]["skipped"]
    assert re.match("more_models:killed: its (process was killed|task in Ray)", results["more_models:killed"]["error"])
    assert (counts["converted"], counts["failed"], counts["skipped"]) == (1, 1, 1)
    assert err.count("kfconvert: error: ") == 1 and "where they like" in err
    assert len(err.splitlines()) == 2, err
    assert sorted(os.listdir("out")) == ["more_models--net", "more_models--other"]


def test_reports_in_whole_blocks_and_a_summary_in_the_order_of_the_names(capsys, monkeypatch):
    def in_any_order(engine, work, tasks, at_once, done):
        assert at_once == 2 and [task.threads for task in tasks] == [max(1, torch.get_num_threads() // 2)] * 3
        for task in reversed(tasks):
            assert not task.jobs.shows_progress and task.jobs.at_once == 1
            done(task, work(task, 0))

    monkeypatch.setattr(jobs, "run_tasks", in_any_order)
    names = ["cli_models:net", "cli_models:exits", "cli_models:other"]
    threads = torch.get_num_threads()
    try:
        assert cli.main(["--models", *names, "--jobs", "2", "--device", "cpu", "--select", "all"]) == 2
    finally:
        torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert out.index("cli_models:other  Net") < out.index("cli_models:net  Net")
    assert [line.split()[0] for line in out.splitlines()[-4:-1]] == names
    assert err.count("kfconvert: error: ") == 1


@pytest.fixture
def on_gpus(monkeypatch):
    """Jobs for a machine of so many GPUs."""

    def made(count, at_once, device="cuda"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        found = jobs.Jobs("cuda", "float32", "random", {}, at_once=at_once)
        found.device = torch.device(device)
        return found

    return made


@pytest.mark.parametrize(
    ("count", "at_once", "device", "possible"),
    [(4, 2, "cuda", 2), (1, 4, "cuda", 1), (4, 4, "cuda:1", 1), (0, 3, "cpu", 3)],
)
def test_one_model_at_a_time_on_each_gpu(on_gpus, count, at_once, device, possible):
    assert on_gpus(count, at_once, device)._possible_at_once() == possible


@pytest.mark.parametrize(
    ("chosen", "names"), [(None, ["0", "1"]), ("3, 5", ["3", "5"]), ("GPU-a,GPU-b,-1", ["GPU-a", "GPU-b"])]
)
def test_a_job_sees_the_gpu_of_its_slot_alone(on_gpus, monkeypatch, chosen, names):
    seen = []

    @contextlib.contextmanager
    def ready(self, names):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise click.ClickException("no such device")
        yield

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    given = on_gpus(2, 2)
    gpus = jobs._visible_gpus()
    assert gpus == names
    monkeypatch.setattr(jobs.Jobs, "ready", ready)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = jobs._work(jobs._Task(given, "net", None, torch.get_num_threads(), gpus), 1)
    assert seen == names[1:] and result["error"] == "net: no such device"
