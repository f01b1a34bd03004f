"""Work in processes of its own: who gets which slot, what becomes of those that die, and how all are ended."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from kfconvert.cli.workers import Lost, Processes, run_tasks


def told(task, slot):
    return task, slot, os.getpid()


def dies(task, slot):
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "ended":
        os.kill(os.getpid(), signal.SIGTERM)
    if task == "exits":
        os._exit(3)
    return task


def endless(task, slot):
    if task == "first":
        return task
    time.sleep(600)


def run(work, tasks, at_once):
    results = {}
    run_tasks(Processes(), work, tasks, at_once, results.__setitem__)
    return results


def test_each_has_a_process_and_a_slot_of_its_own():
    results = run(told, ["a", "b", "c"], 2)
    assert {task: result[0] for task, result in results.items()} == {"a": "a", "b": "b", "c": "c"}
    assert {slot for _, slot, _ in results.values()} == {0, 1}
    assert len({pid for *_, pid in results.values()} | {os.getpid()}) == 4
    assert multiprocessing.active_children() == []


def test_one_that_dies_is_lost_and_no_other():
    results = run(dies, ["killed", "lives", "ended", "exits"], 2)
    assert results.pop("lives") == "lives" and all(isinstance(result, Lost) for result in results.values())
    reasons = {task: result.reason for task, result in results.items()}
    assert reasons == {
        "killed": "its process was killed, possibly because memory ran out",
        "ended": "its process was ended by SIGTERM",
        "exits": "its process ended with the exit code 3",
    }


def test_what_is_raised_while_others_run_ends_them():
    def done(task, result):
        assert threading.active_count() and task == "first"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(Processes(), endless, ["first", "second", "third"], 2, done)
    assert multiprocessing.active_children() == []
