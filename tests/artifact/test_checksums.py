"""Checksums of files of several pieces, and of those that older artifacts have for them."""

import hashlib

import pytest

from kfconvert.artifact import checksums
from kfconvert.artifact.checksums import checksum, has_checksum

PIECE = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(checksums, "_PIECE", PIECE)
    monkeypatch.setattr(checksums, "_READ", 300)


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7])
def test_a_checksum_is_of_all_bytes_in_their_order(tmp_path, size):
    file = tmp_path / "file"
    content = bytes(number * number % 251 for number in range(size))
    file.write_bytes(content)
    pieces = [hashlib.sha256(content[start : start + PIECE]).digest() for start in range(0, size, PIECE)]
    whole = hashlib.sha256(content).hexdigest()
    expected = checksum(file)
    assert expected == (whole if size <= PIECE else f"{PIECE}:{hashlib.sha256(b''.join(pieces)).hexdigest()}")
    assert has_checksum(file, expected) and has_checksum(file, whole)
    assert not has_checksum(file, None) and not has_checksum(file, expected[:-1])
    others = [content + b"\0", content[:-1] if size else b"a", content[PIECE:] + content[:PIECE] + b"b"]
    for place in range(0, size, 97):
        others.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for other in others:
        file.write_bytes(other)
        assert not has_checksum(file, expected) and not has_checksum(file, whole)
