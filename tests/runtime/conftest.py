"""Small models of several kinds, each as it is and converted."""

import pytest
import torch
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


@pytest.fixture(autouse=True)
def compilations_of_other_tests_do_not_count():
    """Dynamo compiles one function so many times and then no more, and all converted models run the same one."""
    yield
    torch._dynamo.reset()
