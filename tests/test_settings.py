"""Environment variables."""

from pathlib import Path

import pytest

from kfconvert.settings import cache_folder


@pytest.mark.parametrize(
    ("own", "xdg", "folder"),
    [
        (None, None, "/home/someone/.cache/kfconvert"),
        ("", "relative", "/home/someone/.cache/kfconvert"),
        (None, "/caches", "/caches/kfconvert"),
        ("/elsewhere", "/caches", "/elsewhere"),
        ("~/mine", None, "/home/someone/mine"),
        ("off", "/caches", None),
    ],
)
def test_the_folder_of_what_is_kept_between_processes(monkeypatch, own, xdg, folder):
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in (("KFCONVERT_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == (None if folder is None else Path(folder))
