"""What a state dict has beside its tensors: the versions of the classes whose weights it holds."""

import pytest
import torch
from torch import nn

from kfconvert import ArtifactError, ModelConverter, load, save

X = torch.randn(4, 16)


class Turned(nn.Linear):
    """Weights of version 1 were stored the other way round."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Plain(nn.Linear):
    """Takes weights without a version for some of before there were versions."""

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version") is None:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b = kind(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def converted(model, x):
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return converter.convert_model(model.eval(), example_inputs=x)


@pytest.mark.parametrize("kind", [Turned, Plain])
def test_weights_are_loaded_as_of_the_version_that_saved_them(kind, tmp_path):
    model = Net(kind)
    save(converted(model, X), tmp_path / "a")
    torch.testing.assert_close(load(tmp_path / "a", model=Net(kind))(X), model(X))


def test_weights_of_an_older_version_are_still_migrated(tmp_path):
    model = Net(Turned)
    save(converted(model, X), tmp_path / "a")
    later = type("Turned", (Turned,), {"_version": 3, "_load_from_state_dict": _negated})
    torch.testing.assert_close(load(tmp_path / "a", model=Net(later)).a.weight, -model.a.weight)


def _negated(self, state, prefix, metadata, *rest):
    assert metadata["version"] == 2
    state[prefix + "weight"] = -state[prefix + "weight"]
    nn.Linear._load_from_state_dict(self, state, prefix, metadata, *rest)


def test_an_error_of_a_class_that_loads_in_its_own_way_is_one_line(tmp_path):
    class Refuses(nn.Linear):
        def _load_from_state_dict(self, *arguments):
            raise KeyError("unheard of")

    save(converted(Net(nn.Linear), X), tmp_path / "a")
    with pytest.raises(ArtifactError, match="the weights do not fit Net: 'unheard of'"):
        load(tmp_path / "a", model=Net(Refuses))
