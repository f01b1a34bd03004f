"""What happens to a converted model between two calls, in nets whose batch norm would make all of it be seen or not."""

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
    """A net and its conversion, both of one's own and called once."""
    both = copy.deepcopy(models[0]), copy.deepcopy(models[1])
    assert_same(both)
    return both


def assert_same(both, x=X):
    with torch.no_grad():
        expected = both[0](x)
        torch.testing.assert_close(both[1](x), expected, rtol=1e-4, atol=1e-4)
    return expected


def assert_change_is_seen(both, change):
    """``change``, made to both, shows in the outputs of the next two calls, which the program serves."""
    before = assert_same(both)
    for model in both:
        change(model)
    served = both[1].kfconvert_info()["guard"]["hits"]
    after = [assert_same(both, x) for x in (X, X + 1)]
    assert any(not torch.allclose(one, other) for one, other in zip(before, after[0])), "the change shows nowhere"
    assert both[1].kfconvert_info()["guard"]["hits"] == served + 2


def written_through_data(model):
    for layer in (model.first, model.head):
        layer.weight.data.mul_(2)


def data_of_a_freed_tensor(model):
    """The new values may come to lie where the old ones were."""
    for number, layer in enumerate((model.first, model.second, model.head)):
        shape, layer.weight.data = layer.weight.shape, torch.empty(0)
        layer.weight.data = torch.full(shape, 0.1 + number)


def replaced(model):
    for number, layer in enumerate((model.first, model.second, model.head, model.other)):
        layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.1 + number))
        layer.bias = nn.Parameter(torch.full_like(layer.bias, 0.2 + number))


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("last_write", ["in train mode", "in eval mode"])
def test_writes_through_data_are_seen_after_a_call_in_train_mode(both, calls, last_write):
    def change(model):
        for _ in range(calls):
            model.train()(X)
            written_through_data(model)
        model.eval()
        if last_write == "in eval mode":
            written_through_data(model)

    for _ in range(2):
        assert_change_is_seen(both, change)


def test_writes_through_data_between_changes_of_the_mode_are_seen(both):
    def change(model):
        model.train()
        written_through_data(model)
        model.eval()

    for _ in range(2):
        assert_change_is_seen(both, change)


def test_a_refresh_sees_writes_through_data(both):
    def change(model):
        written_through_data(model)
        getattr(model, "kfconvert_refresh", lambda: None)()

    for _ in range(2):
        assert_change_is_seen(both, change)


@pytest.mark.parametrize("change", [data_of_a_freed_tensor, replaced], ids=lambda change: change.__name__)
def test_other_tensors_are_seen_each_time(both, change):
    assert_change_is_seen(both, change)
    with torch.no_grad():
        for model in both:
            for parameter in model.parameters():
                parameter.mul_(-0.5)
    assert_same(both)
    assert_change_is_seen(both, change)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_other_weights_of_a_recurrent_layer_are_no_change_of_its_list(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = kind(8, 8), nn.Linear(8, 8)

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
@pytest.mark.parametrize(
    "write",
    [
        lambda layer: nn.init.constant_(layer.weight, 0.1),
        lambda layer: layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()}),
        lambda layer: layer.weight.mul_(3),
    ],
)
def test_a_write_through_another_tensor_in_the_same_memory(write, tied):
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
            write(each[0])
        torch.testing.assert_close(fused(x), plain(x))
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("name", ["first", "second", "head"])
def test_every_call_of_a_module_with_a_hook_calls_it(both, name):
    seen = []
    for model in both:
        getattr(model, name).register_forward_hook(
            lambda _, inputs, output, model=model: seen.append(model) or output * 2
        )
    for _ in range(3):
        assert_same(both)
    assert [seen.count(model) for model in both] == [3, 3]


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_part_of_another_dtype_is_noticed(place, dtype):
    x, model = torch.randn(3, 8), Casting().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x)
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
