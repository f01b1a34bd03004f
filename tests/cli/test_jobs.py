"""Several models at a time: ``--jobs``, by each engine."""

import contextlib
import json
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
from support.selection import exhaustive
from test_cli import leftovers, workplace  # noqa: F401  (a fixture)

from kfconvert.cli import command as cli
from kfconvert.cli import jobs

MORE_MODELS = """
import os, signal, time, pathlib
from cli_models import net, other

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def endless():
    pathlib.Path(f"__pycache__/started-{os.getpid()}").touch()
    time.sleep(600)

endless_too = endless
"""


@pytest.fixture
def start(workplace):  # noqa: F811
    """Starts the command in a group of processes of its own, as a shell does."""
    (workplace / "__pycache__").mkdir(exist_ok=True)
    (workplace / "__pycache__" / "more_models.py").write_text(MORE_MODELS)
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(workplace), str(workplace / "__pycache__")])
    begun = []

    def started(*args):
        begun.append(
            subprocess.Popen(
                [sys.executable, "-m", "kfconvert", *args, "--jobs", "2", "--device", "cpu"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
                # A shell starts what runs in the background with this signal ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        return begun[-1]

    yield started
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.heavy)])
def engine(request):
    """What converts: processes, or a Ray of two workers."""
    if request.param == "ray":
        pytest.importorskip("ray")
    return request.param


def test_results_come_as_they_are_ready_and_a_process_that_is_killed_is_one_line(start, workplace, engine):  # noqa: F811
    saved = workplace / "out" / "more_models--other"
    saved.mkdir(parents=True)
    (saved / "kfconvert.json").touch()
    names = ["more_models:net", "more_models:killed", "more_models:other", "resnet5O"]
    options = ["--json-lines", "--select", "all", "--save-path", "out", "--skip-existing", "--engine", engine]
    process = start("convert", *names, *options)
    out, err = process.communicate(timeout=300)
    *lines, counts = map(json.loads, out.splitlines())
    results = {line["name"]: line for line in lines}
    assert process.returncode == 2 and set(results) == set(names), err
    assert results["more_models:net"]["saved"] == "out/more_models--net"
    assert results["more_models:net"]["statistics"]["environment"]["threads"] == max(1, torch.get_num_threads() // 2)
    assert results["more_models:other"]["skipped"] and "unknown model" in results["resnet5O"]["error"]
    assert re.match("more_models:killed: its process (was killed|died)", results["more_models:killed"]["error"])
    assert (counts["converted"], counts["failed"], counts["skipped"]) == (1, 2, 1)
    assert err.count("kfconvert: error: ") == 2 and "where they like" in err
    assert len(err.splitlines()) == 3, err
    assert sorted(os.listdir("out")) == ["more_models--net", "more_models--other"]


@pytest.mark.parametrize("how", ["Ctrl-C", *exhaustive("SIGKILL")])
def test_no_process_outlives_the_command(start, workplace, how, engine):  # noqa: F811
    models = ["more_models:endless", "more_models:endless_too"]
    process = start("--models", *models, "--save-path", "out", "--engine", engine)
    begun = workplace / "__pycache__"
    deadline = time.monotonic() + 120
    while len(list(begun.glob("started-*"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(file.name.split("-")[1]) for file in begun.glob("started-*")]
    if how == "Ctrl-C":  # which the terminal sends to all of them
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    out, err = process.communicate(timeout=120)  # which waits for whoever else has its stderr
    assert len(pids) == 2 and out == ""
    if how == "Ctrl-C":
        assert process.returncode == 2 and err == "kfconvert: error: interrupted\n"
        assert leftovers(workplace) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:  # until init has seen it end
                os.kill(pid, 0)
                time.sleep(0.05)


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
        found = jobs.Jobs(None, "cuda", "float32", "random", {}, at_once=at_once)
        found.device = torch.device(device)
        return found

    return made


@pytest.mark.parametrize(
    ("count", "at_once", "device", "possible"),
    [(4, 2, "cuda", 2), (2, 4, "cuda", 2), (1, 4, "cuda", 1), (4, 4, "cuda:1", 1), (4, 1, "cuda", 1), (0, 3, "cpu", 3)],
)
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_one_model_at_a_time_on_each_gpu(on_gpus, count, at_once, device, possible):
    assert on_gpus(count, at_once, device)._possible_at_once() == possible


def test_fewer_at_a_time_than_were_asked_for_is_told(on_gpus):
    with pytest.warns(match="kfconvert: --jobs 4: 1 GPU, and one model at a time on each"):
        on_gpus(1, 4)._possible_at_once()


@pytest.mark.parametrize(
    ("chosen", "names"),
    [(None, ["0", "1"]), ("", ["0", "1"]), ("3, 5", ["3", "5"]), ("GPU-a,GPU-b,-1", ["GPU-a", "GPU-b"])],
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
