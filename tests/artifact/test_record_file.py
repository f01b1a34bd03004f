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


ERROR = {"leaf": "", "scale": 1.0, "max_abs": 1.0, "mean_abs": 1.0, "max_rel": None, "mean_rel": 1e-7}
ACCURACY = {"passed": True, "reason": None, "reference": "float64", "original_error": ERROR, "optimized_error": ERROR}


@pytest.mark.parametrize(
    "statistics",
    [
        {"accuracy": {**ACCURACY, "outputs": [{"original_error": ERROR}]}},
        {"accuracy": {**ACCURACY, "outputs": [{"original_error": {"max_rel": "0"}, "optimized_error": ERROR}]}},
        {"accuracy": {**ACCURACY, "optimized_error": {"scale": []}}},
        {"accuracy": {**ACCURACY, "outputs": [{"original_error": ERROR, "optimized_error": ERROR}] * 1001}},
        {"tuned_for": [{"inputs": "x", "weight": "<b>", "timings": None}]},
        {"tuned_for": [{"inputs": "x", "weight": 1.0, "timings": {}}]},
    ],
)
def test_numbers_that_a_person_reads_are_numbers(statistics):
    with pytest.raises(ValidationError):
        record_schema._Statistics.model_validate(statistics)


def test_what_older_versions_do_not_tell_may_be_missing():
    record_schema._Statistics.model_validate({"accuracy": ACCURACY, "tuned_for": None})
    timing = record_schema._Timing.model_validate({"median_ms": 2.0, "q1_ms": 1.0, "q3_ms": 3.0})
    assert timing.rounds is None
