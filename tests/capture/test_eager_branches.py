"""What a forward does only where nothing is traced, and what of it a graph would leave out."""

import copy

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(4, 8)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def body(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Validated(Body):
    def forward(self, x):
        if not torch.compiler.is_compiling() and x.isnan().any():
            raise ValueError("NaN in the input")
        return self.body(x)


class Tried(Body):
    def forward(self, x):
        try:
            if x.isnan().any():
                x = x.nan_to_num()
        except RuntimeError:
            pass
        return self.body(x)


class Asserted(Body):
    def forward(self, x):
        torch._assert_async(x.isfinite().all())
        return self.body(x)


class PerSample(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU())

    def forward(self, x):
        return torch.vmap(self.inner)(x)


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU()) for _ in range(3))

    def forward(self, x):
        held = torch.func.stack_module_state(list(self.members))

        def member(*tensors):
            return torch.func.functional_call(self.members[0], tensors, (x,))

        return torch.vmap(member)(*held).mean(0)


def outcome(model, x):
    try:
        with torch.no_grad():
            return model(x)
    except (ValueError, RuntimeError) as error:
        return type(error)


@pytest.mark.parametrize("kind", [Validated, Tried, Asserted, PerSample, Ensemble])
def test_values_that_only_the_eager_forward_looks_at(kind):
    model = kind().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        copy.deepcopy(model), example_inputs=X
    )
    bad = X.clone()
    bad[0, 0] = float("nan")
    for x in (X, bad, X + 1):
        expected, actual = outcome(model, x), outcome(fused, x)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(actual, expected, equal_nan=True)
        else:
            assert actual is expected
