"""What happens to a converted model between two calls, with and without a batch norm, which train mode writes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import kfconvert
from kfconvert import ModelConverter

X = torch.randn(4, 3, 8, 8)


class Net(nn.Module):
    """Convolutions and a head; with a batch norm, of which every call in train mode writes the counter."""

    def __init__(self, norm: bool):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.second = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 8)
        # The head of a second task: only the weight is read; the holder of the fused layer is not that of the model.
        self.other = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x)).mean((2, 3))
        return torch.relu(self.head(x)), torch.relu(nn.functional.linear(x, self.other.weight))


@pytest.fixture(scope="module", params=[True, False], ids=["batch norm", "no batch norm"])
def models(request):
    torch.manual_seed(0)
    model = Net(request.param).eval()
    return model, ModelConverter(select="all").convert_model(model, example_inputs=X)


@pytest.fixture
def both(models):
    """Copies of a net and of its conversion, called once."""
    both = copy.deepcopy(models[0]), copy.deepcopy(models[1])
    assert_same(both)
    return both


def assert_same(both, x=X):
    with torch.no_grad():
        expected = both[0](x)
        torch.testing.assert_close(both[1](x), expected, rtol=1e-4, atol=1e-4)
    return expected


def written_through_data(model):
    for layer in (model.first, model.head):
        layer.weight.data.mul_(2)


def in_train_mode(model):
    model.train()(X)
    written_through_data(model)
    model.eval()


def after_train_mode(model):
    for _ in range(2):
        model.train()(X)
    model.eval()
    written_through_data(model)


def between_changes_of_the_mode(model):
    model.train()
    written_through_data(model)
    model.eval()


def before_a_refresh(model):
    written_through_data(model)
    getattr(model, "kfconvert_refresh", lambda: None)()


def data_of_a_freed_tensor(model):
    """The new values may get the addresses of the old ones."""
    for number, layer in enumerate((model.first, model.second, model.head)):
        factor, shape = 0.1 + number + layer.weight.data.flatten()[0].abs(), layer.weight.shape
        layer.weight.data = torch.empty(0)
        layer.weight.data = torch.full(shape, float(factor))


def replaced(model):
    for number, layer in enumerate((model.first, model.second, model.head, model.other)):
        factor = float(0.1 + number + layer.weight.data.flatten()[0].abs())
        layer.weight = nn.Parameter(torch.full_like(layer.weight, factor))
        layer.bias = nn.Parameter(torch.full_like(layer.bias, factor))


@pytest.mark.parametrize(
    "change",
    [in_train_mode, after_train_mode, between_changes_of_the_mode, before_a_refresh, data_of_a_freed_tensor, replaced],
    ids=lambda change: change.__name__,
)
def test_new_weights_are_seen_each_time(both, change):
    """The program serves the next two calls, with the new weights."""
    for _ in range(2):
        before = assert_same(both)
        for model in both:
            change(model)
        served = both[1].kfconvert_info()["guard"]["hits"]
        after = [assert_same(both, x) for x in (X, X + 1)]
        assert any(not torch.allclose(one, other) for one, other in zip(before, after[0])), "the change shows nowhere"
        assert both[1].kfconvert_info()["guard"]["hits"] == served + 2


def test_other_weights_of_a_recurrent_layer_are_no_change_of_its_list():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = nn.LSTM(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.relu(self.head(self.recurrent(x)[0]))

    model, x = Recurrent().eval(), torch.randn(3, 2, 8)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x)
    others = {name: value * 2 for name, value in model.state_dict().items()}
    with torch.no_grad():
        for each in (model, fused):
            each(x)
            each.load_state_dict(others)
        torch.testing.assert_close(fused(x), model(x))
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


@pytest.mark.parametrize("tied", ["before the conversion", "after it"])
def test_a_write_through_another_tensor_in_the_same_memory(tied):
    def tie(model):
        model[3].weight.data = model[0].weight.data

    block = (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model, x = nn.Sequential(*block, *map(copy.deepcopy, block)).eval(), torch.randn(2, 4, 9, 9)
    plain = copy.deepcopy(model)
    if tied != "after it":
        tie(model)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x, inplace=True)
    for each in (plain, fused):
        tie(each)
    with torch.no_grad():
        fused(x)
        for each in (plain, fused):
            each[0].load_state_dict({name: 2 * value for name, value in each[0].state_dict().items()})
        torch.testing.assert_close(fused(x), plain(x))
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


class Casting(nn.Module):
    """Layers that may have a dtype each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x.to(layer.weight.dtype)))
        return x


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_part_of_another_dtype_is_noticed():
    x, model = torch.randn(3, 8), Casting().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x)
    for place, dtype in ((0, torch.float64), (2, torch.bfloat16)):
        for each in (model, fused):
            each.layers[place].to(dtype)
        for _ in range(2):
            assert_same((model, fused), x)
        for each in (model, fused):
            each.float()
        assert_same((model, fused), x)


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_weights_that_are_kept_around_several_calls(frozen):
    x = torch.randn(3, 8)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(normed, nn.GELU(), nn.Linear(8, 8), nn.GELU()).eval()  # the second linear is fused
    both = model, ModelConverter(select="all").convert_model(model, example_inputs=x)
    if frozen:
        kfconvert.freeze(both[1])
    with parametrize.cached():
        before = assert_same(both, x)
        if not frozen:
            for each in both:
                each[0].parametrizations.weight.original1.data.fill_(0.25)
        assert torch.equal(assert_same(both, x), before)
    assert_same(both, x)
    info = both[1].kfconvert_info()["guard"]
    assert info["hits"] == 1 and any("parametrize.cached()" in reason for reason in info["misses"])
