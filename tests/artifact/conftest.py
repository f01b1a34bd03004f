import pytest


@pytest.fixture
def path(saved, tmp_path):
    """A copy of the artifact ``saved``, to be damaged."""
    copied = tmp_path / "net"
    copied.mkdir()
    for file in saved.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied
