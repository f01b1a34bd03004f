"""Folders whose files are replaced together: errors, Ctrl-C and kills on the way."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kfconvert import folders


def write(path, text: str) -> None:
    with folders.replacing(Path(path)) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text)


def entries(path) -> list[str]:
    return sorted(os.listdir(path))


def texts(path) -> set[str]:
    return {(path / name).read_text() for name in ("a", "b")}


def test_files_of_the_new_take_the_place_of_the_old_and_others_stay(tmp_path):
    path = tmp_path / "deep" / "net"
    write(path, "old")
    (path / "c").write_text("mine")
    write(path, "new")
    assert texts(path) == {"new"} and entries(path) == ["a", "b", "c"] and entries(path.parent) == ["net"]


def test_a_writer_that_is_killed_leaves_the_old(tmp_path):
    """Its folder is not part of the contents, and goes after a day."""
    path = tmp_path / "net"
    write(path, "old")
    code = (
        "import os, signal, sys; from pathlib import Path; from kfconvert import folders\n"
        "with folders.replacing(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'a').write_text('new')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode < 0
    assert texts(path) == {"old"} and folders.names(path) == {"a", "b"} and len(entries(path)) == 3
    write(path, "new")
    (partial,) = path.glob(".kfconvert-*.partial")
    os.utime(partial, (time.time() - 10**6,) * 2)
    write(path, "newer")
    assert texts(path) == {"newer"} and entries(path) == ["a", "b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no")], ids=repr)
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_between_the_replacements_leaves_no_mixture(tmp_path, monkeypatch, error, number):
    path, replace, calls = tmp_path / "net", os.replace, []
    write(path, "old")

    def failing(*args):
        calls.append(args)
        if len(calls) == number + 1:
            raise error
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(type(error)):
            write(path, "new")
    assert texts(path) == {"new"} and entries(path) == ["a", "b"]


def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, "new")
    assert entries(tmp_path) == ["b"]


@pytest.mark.parametrize("depth", [0, 2])
def test_check_writable_leaves_no_trace(tmp_path, depth):
    folders.check_writable(tmp_path.joinpath(*["new"] * depth))
    assert entries(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        folders.check_writable(tmp_path / "file" / "new")
