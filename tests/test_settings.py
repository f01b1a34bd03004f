"""Environment variables."""

import pytest

from kfconvert.settings import SettingError, max_rewrites


@pytest.mark.parametrize(("value", "limit"), [(None, 7), ("", 7), (" ", 7), ("0", 0), ("12", 12), (" 3 ", 3)])
def test_limit_of_rewrites(monkeypatch, value, limit):
    monkeypatch.delenv("KFCONVERT_MAX_REWRITES", raising=False)
    if value is not None:
        monkeypatch.setenv("KFCONVERT_MAX_REWRITES", value)
    assert max_rewrites(7) == limit


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "0x10"])
def test_limit_that_is_no_number(monkeypatch, value):
    monkeypatch.setenv("KFCONVERT_MAX_REWRITES", value)
    with pytest.raises(SettingError, match=f"^KFCONVERT_MAX_REWRITES must be a whole number from 0 on, not '{value}'$"):
        max_rewrites(7)
