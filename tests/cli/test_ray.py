"""Models in tasks of Ray: ``--engine ray``. Here something stands for Ray, which runs itself in ``test_jobs``."""

import json
import sys
import types

import click
import pytest
import torch
from test_cli import one_error, workplace  # noqa: F401  (a fixture)

from kfconvert.cli import command as cli
from kfconvert.cli import jobs, ray_tasks
from kfconvert.cli.workers import Lost, run_tasks


def test_without_ray_one_line_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["--models", "cli_models:net", "--engine", "ray"]) == 2
    one_error(capsys, "--engine ray needs Ray: pip install 'kfconvert[ray]'")


class _RayError(Exception):
    pass


class _Reference:
    def __init__(self, serve, args):
        self.serve, self.args = serve, args


@pytest.fixture
def ray(monkeypatch):
    """Stands for Ray: it says what it has, and works on a task where its result is asked for."""
    found = types.SimpleNamespace(
        __spec__="for whoever asks whether it is installed",
        exceptions=types.SimpleNamespace(RayError=_RayError),
        _private=types.SimpleNamespace(worker=types.SimpleNamespace()),
        has={"CPU": 8.0},
        started=[],
        stopped=0,
        asked=[],
        cancelled=[],
    )

    def remote(**asked):
        found.asked.append(asked)
        return lambda serve: types.SimpleNamespace(remote=lambda *args: _Reference(serve, args))

    def get(each):
        return each.serve(*each.args)

    def shutdown():
        found.stopped += 1

    found.remote, found.get, found.shutdown = remote, get, shutdown
    found.init = lambda **given: found.started.append(given)
    found.cluster_resources = lambda: found.has
    found.wait = lambda running, **_: (running[:1], running[1:])
    found.cancel = lambda each: found.cancelled.append(each.args[1])
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


def run(work, tasks, at_once, threads=4, on_gpus=False):
    results = {}
    with ray_tasks.ray_tasks(at_once, threads, on_gpus) as engine:
        run_tasks(engine, work, tasks, at_once, results.__setitem__)
    return results


@pytest.mark.parametrize(("cpus", "at_once", "threads", "each"), [(8, 2, 8, 4), (8, 2, 3, 3), (2, 8, 2, 1)])
def test_each_task_has_its_share_of_the_cpus_and_a_gpu_where_there_are_any(ray, cpus, at_once, threads, each):
    ray.has = {"CPU": float(cpus), "GPU": 2.0}
    assert run(lambda task, slot: task, ["a", "b", "c"], at_once, threads) == {"a": "a", "b": "b", "c": "c"}
    run(lambda task, slot: task, ["a"], at_once, threads, on_gpus=True)
    assert [(asked["num_cpus"], asked["num_gpus"]) for asked in ray.asked] == [(each, 0), (each, 1)]
    assert ray.stopped == 2


def test_a_task_that_fails_is_lost_and_no_other(ray):
    def work(task, slot):
        if task != "lives":
            raise ray.exceptions.RayError("memory ran out\nand a second line")
        return task

    assert run(work, ["fails", "lives"], 2) == {
        "fails": Lost("its task in Ray failed: memory ran out"),
        "lives": "lives",
    }


def test_what_is_raised_ends_the_tasks_that_run_and_ray(ray):
    def work(task, slot):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work, ["first", "second", "third"], 2)
    assert ray.cancelled == ["first", "second"]
    assert ray.stopped == 1


def test_ray_that_does_not_start_or_has_no_gpus_is_one_line(ray):
    with pytest.raises(click.ClickException, match="^Ray has no GPUs: --device cpu, or --engine process$"):
        run(lambda task, slot: task, ["a"], 1, on_gpus=True)
    assert ray.stopped == 1

    def refuses(**_):
        raise ConnectionError("no cluster there\nand more")

    ray.init = refuses
    with pytest.raises(click.ClickException, match="^Ray does not start: no cluster there$"):
        run(lambda task, slot: task, ["a"], 1)


def test_a_gpu_with_a_number_is_not_for_ray(ray):
    found = jobs.Jobs("cuda:1", "float32", "random", {}, at_once=4, engine="ray")
    found.device = torch.device("cuda:1")
    with pytest.raises(click.ClickException, match="^Ray chooses the GPU of each model: --device cuda, not cuda:1$"):
        found._side_by_side(["net"], {"net": None}, found._possible_at_once(), lambda *_: None)
    assert ray.started == []


def test_one_model_at_a_time_is_a_task_as_well(ray, capsys, monkeypatch):
    before = torch.get_num_threads()
    names = ["cli_models:net", "cli_models:exits", "cli_models:other"]
    try:
        code = cli.main(["--models", *names, "--engine", "ray", "--device", "cpu", "--select", "all", "--json-lines"])
    finally:
        torch.set_num_threads(before)
    out, err = capsys.readouterr()
    *lines, counts = map(json.loads, out.splitlines())
    assert code == 2 and [line["name"] for line in lines] == names
    assert (counts["converted"], counts["failed"]) == (2, 1) and "where they like" in err
    assert len(ray.started) == ray.stopped == 1
