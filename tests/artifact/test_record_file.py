"""Records of just the largest size are written and read, and none beyond it."""

import pytest
from pydantic import ValidationError

from kfconvert.artifact import record as record_file
from kfconvert.artifact import schema as record_schema
from kfconvert.artifact.record import RecordError


def test_the_largest_record_that_is_written(tmp_path, monkeypatch):
    size = len(record_file.sealed({"format": 1}, tmp_path).encode())
    monkeypatch.setattr(record_file, "LARGEST", size)
    record_file.sealed({"format": 1}, tmp_path)
    monkeypatch.setattr(record_file, "LARGEST", size - 1)
    with pytest.raises(RecordError, match=f"more than {size - 1} bytes"):
        record_file.sealed({"format": 1}, tmp_path)


def test_the_largest_record_that_is_read(tmp_path, monkeypatch):
    file = tmp_path / "kfconvert.json"
    file.write_text("{}")
    for largest, message in ((2, "format"), (1, "more than 1 bytes")):
        monkeypatch.setattr(record_file, "LARGEST", largest)
        with pytest.raises(RecordError, match=message):
            record_file.read(file)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(value):
    """JSON has no infinity, but Python reads 1e999 as one."""
    with pytest.raises(ValidationError, match="finite"):
        record_schema._Timing.model_validate({"median_ms": value, "q1_ms": 1.0, "q3_ms": 1.0})
