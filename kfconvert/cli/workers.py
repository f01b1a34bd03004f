"""Parallel tasks: the loop over them, and the engine that runs each task in a separate process."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple, Protocol

# Seconds that an interrupted process has for its clean-up.
SECONDS_TO_END = 10.0
_CHILD = "from kfconvert.cli.workers import serve; serve()"


class Lost(NamedTuple):
    """The outcome of a task that ended without a result, with the ``reason`` as text."""

    reason: str


class Engine(Protocol):
    """An engine runs tasks in isolation from each other."""

    def start(self, work: Callable[[Any, int], Any], task: Any, slot: int) -> Any:
        """Starts ``work(task, slot)`` and returns a hashable handle."""

    def ended(self, running: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Waits until at least one of ``running`` (not empty) has ended. Yields each ended handle with its result or
        ``Lost``."""

    def end(self, running: Sequence[Any]) -> None:
        """Ends all of ``running``, with SECONDS_TO_END for their clean-up."""


def run_tasks(
    engine: Engine,
    work: Callable[[Any, int], Any],
    tasks: Sequence[Any],
    at_once: int,
    done: Callable[[Any, Any], None],
) -> None:
    """Calls ``done(task, result)`` when a task ends, with the result of ``work(task, slot)`` or ``Lost``. ``work``,
    tasks and results are pickled.

    Args:
        at_once: number of parallel tasks. ``slot`` is below it, and parallel tasks have different slots.

    Any exception in here, such as Ctrl-C, ends all running tasks.
    """
    waiting, free = list(reversed(tasks)), list(reversed(range(at_once)))
    running: dict[Any, tuple[Any, int]] = {}
    try:
        while waiting or running:
            while waiting and free:
                task, slot = waiting.pop(), free.pop()
                running[engine.start(work, task, slot)] = task, slot
            for each, result in engine.ended(list(running)):
                task, slot = running.pop(each)
                free.append(slot)
                done(task, result)
    finally:
        engine.end(list(running))


class Processes:
    """An engine that runs each task in a separate process.

    Such a process interrupts itself when its stdin is closed: by ``end``, or by the end of this process.
    """

    def start(self, work: Callable[[Any, int], Any], task: Any, slot: int) -> Any:
        process: Any = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that the terminal does not send it a Ctrl-C as well
        )
        process.stdin.write(pickle.dumps((work, task, slot)))
        process.stdin.flush()
        return process

    def ended(self, running: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        ready = connection.wait([each.stdout for each in running])
        for each in running:
            if each.stdout in ready:
                with each:
                    sent = each.stdout.read()  # until the process ends
                yield each, Lost(_how_it_ended(each.returncode)) if each.returncode else pickle.loads(sent)

    def end(self, running: Sequence[Any]) -> None:
        """Interrupts each process, and kills it if it does not end in time."""
        deadline = time.monotonic() + SECONDS_TO_END
        try:
            for each in running:
                each.stdin.close()
            for each in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.wait(max(0.0, deadline - time.monotonic()))
        finally:  # at a second Ctrl-C as well
            for each in running:
                each.kill()
                each.wait()


def _how_it_ended(exit_code: int) -> str:
    """Describes the ``exit_code`` of a process; a negative one is the signal that ended it."""
    if exit_code == -signal.SIGKILL:
        return "its process was killed, possibly because memory ran out"
    if exit_code < 0:
        return f"its process was ended by {signal.Signals(-exit_code).name}"
    return f"its process ended with the exit code {exit_code}"


def serve() -> None:
    """Runs the task from stdin in this process, and writes its result to stdout. Other output goes to stderr."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    results = open(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        work, task, slot = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        pickle.dump(work(task, slot), results)
        results.flush()
    except KeyboardInterrupt:  # reported by the parent
        os._exit(128 + signal.SIGINT)
    os._exit(0)  # without waiting for threads of libraries


def _end_with_parent() -> None:
    os.read(0, 1)  # returns at the end of the pipe
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
