"""Environment variables."""

from pathlib import Path

import pytest

from kfconvert.settings import SettingError, cache_folder, max_rewrites


@pytest.mark.parametrize(("value", "limit"), [(None, 7), ("", 7), (" ", 7), ("0", 0), ("12", 12), (" 3 ", 3)])
def test_limit_of_rewrites(monkeypatch, value, limit):
    monkeypatch.delenv("KFCONVERT_MAX_REWRITES", raising=False)
    if value is not None:
        monkeypatch.setenv("KFCONVERT_MAX_REWRITES", value)
    assert max_rewrites(7) == limit


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "0x10"])
def test_limit_that_is_no_number(monkeypatch, value):
    monkeypatch.setenv("KFCONVERT_MAX_REWRITES", value)
    with pytest.raises(SettingError, match=f"^KFCONVERT_MAX_REWRITES must be an integer of at least 0, not '{value}'$"):
        max_rewrites(7)


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
