"""Folders whose files change together: writers that are killed at any step, and many at the same time."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from kfconvert import folders

# Everything with which a writer changes a file system; each call of one is a step.
STEPS = ("mkdir", "rename", "replace", "rmdir", "unlink", "fsync", "open")


def write(path, text: str) -> None:
    with folders.replacing(Path(path)) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text)


def read(path) -> str:
    """The text of the two files, which must be of one writer."""
    path = Path(path)
    with folders.reading(path):
        texts = {folders.newest(path, name).read_text() for name in ("a", "b")}
    (text,) = texts
    return text


def run(code: str, *args, **options) -> subprocess.CompletedProcess:
    """Runs ``code`` in another process, with ``write`` and the arguments; torch is not imported there."""
    lines = [f"import sys; sys.path[:0] = {[os.path.dirname(__file__), str(Path(__file__).parents[2])]!r}"]
    source = "\n".join([*lines, WRITER, textwrap.dedent(code)])
    return subprocess.run([sys.executable, "-c", source, *map(str, args)], timeout=60, **options)


WRITER = f"""
import os, signal
from pathlib import Path
from kfconvert import folders

def write(path, text):
    with folders.replacing(Path(path)) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text)

def killed_before(step):
    done = 0
    def counted(call):
        def counting(*args, **kwargs):
            nonlocal done
            done += 1
            if done > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return counting
    for name in {STEPS!r}:
        setattr(os, name, counted(getattr(os, name)))
"""


def entries(path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("before", [None, "old"])
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_and_the_next_clears_up(tmp_path, before):
    """Killed by the system itself, before each of the calls that change files, until there is none left."""
    seen, step = [], 0
    while True:
        path = tmp_path / f"net {step}"
        if before:
            write(path, before)
        finished = run("killed_before(int(sys.argv[2]))\nwrite(sys.argv[1], 'new')", path, step)
        if finished.returncode == 0:
            break
        assert finished.returncode == -signal.SIGKILL
        try:
            seen.append(read(path))
        except FileNotFoundError:
            assert before is None
            seen.append(None)
        write(path, "next")
        assert read(path) == "next" and entries(path) == ["a", "b"]
        step += 1
    assert entries(path) == ["a", "b"] and step > 10
    # Once the new files are there they stay: there is one moment at which they take the place of the old.
    moment = seen.index("new")
    assert seen == [before] * moment + ["new"] * (step - moment) and 0 < moment < step
    assert entries(tmp_path) == sorted(f"net {index}" for index in range(step + 1))


AMENDED = """
def amend(path):
    with folders.amending(Path(path)) as folder:
        for name in ("a", "b"):
            (folder / name).write_text((Path(path) / name).read_text() + " and more")
"""


def test_an_amendment_that_is_killed_at_any_step_is_there_as_a_whole_or_not_at_all(tmp_path):
    seen, step = [], 0
    while True:
        path = tmp_path / f"net {step}"
        write(path, "old")
        (path / "c").write_text("stays")
        finished = run(f"{AMENDED}\nkilled_before(int(sys.argv[2]))\namend(sys.argv[1])", path, step)
        seen.append(read(path))
        assert (path / "c").read_text() == "stays"
        if finished.returncode == 0:
            break
        assert finished.returncode == -signal.SIGKILL
        run(f"{AMENDED}\namend(sys.argv[1])", path, check=True)
        assert read(path) == f"{seen[-1]} and more"
        write(path, "next")
        assert read(path) == "next" and entries(path) == ["a", "b", "c"]
        step += 1
    moment = seen.index("old and more")
    assert seen == ["old"] * moment + ["old and more"] * (step + 1 - moment) and 0 < moment < step


def test_nobody_reads_or_writes_what_is_being_amended(tmp_path):
    path, others = tmp_path / "net", []
    write(path, "old")
    with folders.amending(path) as folder:
        for each in (lambda: others.append(read(path)), lambda: write(path, "other")):
            thread = threading.Thread(target=each)
            thread.start()
            thread.join(0.2)
            assert thread.is_alive() and not others
        for name in ("a", "b"):
            (folder / name).write_text((path / name).read_text() + " and more")
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(10)
    assert others in (["old and more"], ["other"]) and read(path) == "other" and entries(path) == ["a", "b"]


def test_what_does_not_exist_is_not_amended(tmp_path):
    with pytest.raises(FileNotFoundError), folders.amending(tmp_path / "net"):
        pass
    assert entries(tmp_path) == []


def test_what_a_living_writer_has_begun_is_left_alone(tmp_path):
    path = tmp_path / "net"
    with folders.replacing(path) as folder:
        (folder / "a").write_text("slow")
        run("write(sys.argv[1], 'quick')", path, check=True)
        assert read(path) == "quick" and (folder / "a").read_text() == "slow"
        (folder / "b").write_text("slow")
    assert read(path) == "slow" and entries(path) == ["a", "b"]


def test_processes_and_threads_that_write_one_folder_all_succeed(tmp_path):
    path, errors, seen = tmp_path / "deep" / "net", [], set()

    def writing(text: str) -> None:
        try:
            for round in range(15):
                write(path, f"{text} {round}")
        except BaseException as error:
            errors.append(error)

    def reading_on() -> None:
        try:
            while any(thread.is_alive() for thread in threads[:-1]):
                if path.exists():
                    seen.add(read(path))
        except FileNotFoundError:
            pass  # nothing is there yet
        except BaseException as error:
            errors.append(error)

    code = "for round in range(15): write(sys.argv[1], f'{sys.argv[2]} {round}')"
    processes = [threading.Thread(target=run, args=(code, path, f"p{i}"), kwargs={"check": True}) for i in range(2)]
    threads = [threading.Thread(target=writing, args=(f"t{i}",)) for i in range(4)]
    threads += [*processes, threading.Thread(target=reading_on)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert read(path).endswith(" 14") and entries(path) == ["a", "b"] and entries(path.parent) == ["net"]


def test_a_writer_that_fails_and_one_that_starts_do_not_meet(tmp_path):
    """The first removes the folder that it made, at the very moment at which the second is about to use it."""
    path, failing, removed = tmp_path / "net", threading.Event(), threading.Event()
    mkdir = Path.mkdir

    def meeting(self, *args, **kwargs):
        if self.name.endswith(".partial") and threading.current_thread() is not threading.main_thread():
            failing.set()
            removed.wait(10)
        return mkdir(self, *args, **kwargs)

    second = threading.Thread(target=write, args=(path, "second"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", meeting)
        with pytest.raises(RuntimeError, match="mine"), folders.none_left_empty(path):
            path.mkdir()
            second.start()
            failing.wait(10)
            raise RuntimeError("mine")
        assert not path.exists()
        removed.set()
        second.join()
    assert read(path) == "second"


def test_the_working_directory_stays_that_of_everybody(tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    monkeypatch.chdir(tmp_path / "net")
    for text in ("first", "second"):
        write(".", text)
        assert os.getcwd() == str(tmp_path / "net") and entries(".") == ["a", "b"] and read(".") == text


def test_a_process_forked_meanwhile_holds_no_lock(tmp_path):
    """Workers of a data loader have copies of all descriptors, and live on while the model is saved again."""
    path = tmp_path / "net"
    with folders.replacing(path) as folder:
        (folder / "a").write_text("1")
        (folder / "b").write_text("1")
        copies = [os.dup(int(name)) for name in os.listdir("/proc/self/fd") if _is_partial(name)]
    partial = folder.with_name(".kfconvert-0.partial")
    partial.mkdir()
    try:
        write(path, "2")
        assert read(path) == "2" and copies and entries(path) == ["a", "b"]
    finally:
        for copy in copies:
            os.close(copy)


def _is_partial(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".partial")
    except FileNotFoundError:
        return False


def test_without_locks_nobodys_files_are_cleared(tmp_path, monkeypatch):
    """A network file system that refuses them: what may be a living writer's is left alone."""

    def refuse(*args):
        raise OSError(folders.errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    path = tmp_path / "net"
    with folders.replacing(path) as folder:
        (folder / "a").write_text("slow")
        write(path, "quick")
        (folder / "b").write_text("slow")
    assert read(path) == "slow" and entries(path) == ["a", "b"]


def test_an_error_of_the_block_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), folders.replacing(tmp_path / "deep" / "net") as folder:
        (folder / "a").write_text("new")
        raise KeyboardInterrupt
    assert entries(tmp_path) == []


@pytest.mark.parametrize("depth", [0, 2])
def test_check_writable_leaves_no_trace(tmp_path, depth):
    folders.check_writable(tmp_path.joinpath(*["new"] * depth))
    assert entries(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        folders.check_writable(tmp_path / "file" / "new")
