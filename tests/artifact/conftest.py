import shutil

import pytest

from kfconvert.capture import tracer


@pytest.fixture
def path(saved, tmp_path):
    """A copy of the artifact ``saved``, to be changed."""
    return shutil.copytree(saved, tmp_path / "net")


@pytest.fixture
def traces(monkeypatch):
    """The modules that were traced since."""
    found, own = [], tracer._export
    monkeypatch.setattr(tracer, "_export", lambda model, *rest: (found.append(model), own(model, *rest))[1])
    return found
