"""Small models of several kinds, each as it is and converted."""

import pytest
from support.small_models import MAKERS, converted


@pytest.fixture(params=MAKERS)
def make(request):
    """One of the makers; ``original`` and ``fused`` are its model and that model converted."""
    return MAKERS[request.param]


@pytest.fixture
def original(make):
    return make()


@pytest.fixture
def fused(make):
    return converted(make)
