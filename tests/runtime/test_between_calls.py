"""What happens to a converted model between two calls, with and without a batch norm, which train mode writes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import kfconvert
from kfconvert import ModelConverter

X = torch.randn(4, 3, 8, 8)


def assert_same(both, x=X):
    with torch.no_grad():
        expected = both[0](x)
        torch.testing.assert_close(both[1](x), expected, rtol=1e-4, atol=1e-4)
    return expected


def test_other_weights_of_a_recurrent_layer_are_no_change_of_its_list():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = nn.LSTM(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.relu(self.head(self.recurrent(x)[0]))

    model, x = Recurrent().eval(), torch.randn(3, 2, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    others = {name: value * 2 for name, value in model.state_dict().items()}
    with torch.no_grad():
        for each in (model, fused):
            each(x)
            each.load_state_dict(others)
        torch.testing.assert_close(fused(x), model(x))
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_weights_that_are_kept_around_several_calls(frozen):
    x = torch.randn(3, 8)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(normed, nn.GELU(), nn.Linear(8, 8), nn.GELU()).eval()  # the second linear is fused
    both = (
        model,
        ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x),
    )
    if frozen:
        kfconvert.freeze(both[1])
    with parametrize.cached():
        before = assert_same(both, x)
        if not frozen:
            for each in both:
                nn.init.constant_(each[0].parametrizations.weight.original1, 0.25)
        assert torch.equal(assert_same(both, x), before)
    assert_same(both, x)
    info = both[1].kfconvert_info()["guard"]
    assert info["hits"] == 1 and any("parametrize.cached()" in reason for reason in info["misses"])


class Functional(nn.Module):
    """The attributes of its parameters have other names than those of fused modules."""

    def __init__(self):
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))
        self.gain, self.offset = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = nn.functional.layer_norm(x, (8,), self.gain, self.offset)
        return nn.functional.gelu(nn.functional.linear(x, self.matrix, self.shift))


def test_replaced_parameters_of_functions():
    x, model = torch.randn(4, 8), Functional().eval()
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    both = model, converter.convert_model(model, example_inputs=x)
    before = assert_same(both, x)
    others = {name: nn.Parameter(2 * value.detach()) for name, value in model.named_parameters()}
    for each in both:
        for name, value in others.items():
            setattr(each, name, value)
    assert not torch.equal(assert_same(both, x), before)
    assert both[1].kfconvert_info()["guard"] == {"hits": 2, "misses": {}}
