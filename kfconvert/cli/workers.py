"""Some work for each of several things at a time, each in a process of its own that ends with this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple

# What a process gets to put away what it has begun, once it is asked to end.
SECONDS_TO_END = 10.0


class Lost(NamedTuple):
    """A process that ended without a result: its exit code, or the signal that ended it as a negative number."""

    exit_code: int | None

    def reason(self) -> str:
        if self.exit_code == -signal.SIGKILL:
            return "its process was killed, as systems do where memory runs out"
        if self.exit_code is not None and self.exit_code < 0:
            return f"its process was ended by {signal.Signals(-self.exit_code).name}"
        return f"its process ended with the exit code {self.exit_code}"


class _Running(NamedTuple):
    task: Any
    slot: int
    process: Any
    results: connection.Connection


def in_processes(
    work: Callable[[Any, int], Any], tasks: Sequence[Any], at_once: int, done: Callable[[Any, Any], None]
) -> None:
    """Calls ``done(task, result)`` as each of ``tasks`` ends, with what ``work(task, slot)`` has returned in a process
    of its own, or ``Lost``. ``work``, tasks and results are pickled.

    Args:
        at_once: so many run at a time; ``slot`` is below it, and no two that run at a time have the same.

    Whatever is raised in here, Ctrl-C among it, ends all processes: each is interrupted, and killed where it takes
    longer than SECONDS_TO_END. Where this process is killed itself, they interrupt themselves.
    """
    waiting, free = list(reversed(tasks)), list(reversed(range(at_once)))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(_started(work, waiting.pop(), free.pop()))
            connection.wait([place for each in running for place in (each.results, each.process.sentinel)])
            for each in [each for each in running if each.results.poll() or not each.process.is_alive()]:
                result = _result(each)
                running.remove(each)
                free.append(each.slot)
                done(each.task, result)
    finally:
        _end([each.process for each in running])


def _started(work: Callable[[Any, int], Any], task: Any, slot: int) -> _Running:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, work, task, slot))
    with theirs, _uninterrupted():
        process.start()
    return _Running(task, slot, process, ours)


def _result(each: _Running) -> Any:
    """What the process has sent, once it is gone and its memory is free."""
    found: Any = None
    with each.results, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        if each.results.poll():
            found = (each.results.recv(),)
    each.process.join(SECONDS_TO_END)
    if each.process.is_alive():
        each.process.kill()
        each.process.join()
    return found[0] if found else Lost(each.process.exitcode)


def _end(processes: Iterable[Any]) -> None:
    deadline = time.monotonic() + SECONDS_TO_END
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # at a second Ctrl-C as well
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A process that is started within the block has SIGINT blocked, so that a Ctrl-C, which the terminal sends to all,
    waits until ``_serve`` is ready for it."""
    resource_tracker.ensure_running()  # where it is started it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(results: connection.Connection, work: Callable[[Any, int], Any], task: Any, slot: int) -> None:
    """What the process does."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and the parent may both send it
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=_end_with_parent, daemon=True).start()
        results.send(work(task, slot))
    except KeyboardInterrupt:  # told by the parent
        sys.exit(128 + signal.SIGINT)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
