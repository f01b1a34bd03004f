"""What the user wants fused and what not: ``include``, ``exclude``, ``modules``, ``filter_fn``."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ConversionConfig, ConversionError, ModelConverter, auto_convert_model

X = torch.randn(3, 8)


class Block(nn.Module):
    """A product of its layer and an activation of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Net(nn.Module):
    """Blocks with activations of their own, and one whose activation is a module."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.encoder_too = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.encoder:
            x = block(x)
        return torch.relu(self.encoder_too(self.tail(x)))


def converted(model, example_inputs=X, **options):
    """The converted model, with every accurate site that is wanted, and its statistics."""
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was fused is what some tests want
        return converter.convert_model(model, example_inputs=example_inputs), converter.conversion_stats


def applied(stats):
    return sorted((site["pattern"], site["module"]) for site in stats["sites"] if site["status"] == "applied")


def reasons(stats):
    """Why sites were left out, by pattern and module."""
    sites = (site for site in stats["sites"] if site["status"] == "rejected")
    return {(site["pattern"], site["module"]): site["reason"] for site in sites}


EVERY = [
    ("linear_gelu", "tail.0"),
    ("linear_relu", "encoder.0.linear"),
    ("linear_relu", "encoder.1.linear"),
    ("linear_relu", "encoder_too"),
]


@pytest.mark.parametrize(
    ("options", "left_out", "reason"),
    [
        ({"exclude": ["conv_bn*", "linear_r?lu"]}, EVERY[1:], "excluded by exclude=['linear_r?lu']"),
        ({"include": ["linear_*"], "exclude": ["linear_relu"]}, EVERY[1:], "excluded by exclude=['linear_relu']"),
        ({"include": []}, EVERY, "excluded by include=[]"),
        (
            {"modules": ["encoder*"]},
            [EVERY[0], EVERY[3]],
            {
                EVERY[0]: "excluded by modules=['encoder*']: it covers tail.1",
                # The activation is one of the model itself.
                EVERY[3]: "excluded by modules=['encoder*']: it covers the model itself",
            },
        ),
    ],
)
def test_what_is_left_out_says_by_which_option(options, left_out, reason):
    model = Net().eval()
    fused, stats = converted(model, **options)
    found = {key: value for key, value in reasons(stats).items() if key in left_out}
    assert sorted(found) == left_out
    assert found == (reason if isinstance(reason, dict) else dict.fromkeys(left_out, reason))
    assert not set(left_out) & set(applied(stats)) and set(EVERY) - set(left_out) <= set(applied(stats))
    torch.testing.assert_close(fused(X), model(X))


@pytest.mark.parametrize("entry", ["encoder", "enc?der.*", "*.linear"])
def test_modules_are_those_named_and_all_within_them(entry):
    _, stats = converted(Net(), modules=[entry])
    # The activations are calls of the blocks, not of the linear modules in them.
    name = "linear" if entry == "*.linear" else "linear_relu"
    assert applied(stats) == [(name, f"encoder.{index}.linear") for index in range(2)]


@pytest.mark.parametrize(
    ("entries", "left_out"),
    [(["!encoder"], EVERY[1:3]), (["encoder", "!encoder.0"], [EVERY[0], EVERY[1], EVERY[3]])],
)
def test_modules_may_name_those_in_which_nothing_is_fused(entries, left_out):
    _, stats = converted(Net(), modules=entries)
    assert applied(stats) == [site for site in EVERY if site not in left_out]
    told = f"excluded by modules=[{', '.join(map(repr, entries))}]: it covers "
    assert all(reasons(stats)[site].startswith(told) for site in left_out)


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
@pytest.mark.parametrize("option", ["modules", "chosen_modules"])
def test_an_empty_list_names_nothing(option):
    _, stats = converted(Net(), **{option: []})
    assert applied(stats) == []


def test_a_module_is_meant_by_each_of_its_names():
    model = Net()
    model.shared = model.encoder
    _, stats = converted(model, modules=["shared.0"])
    assert applied(stats) == EVERY[1:2]
    _, stats = converted(model, modules=["!shared.0"])
    assert applied(stats) == [EVERY[0], *EVERY[2:]]


def test_a_filter_is_asked_once_for_each_module_of_the_model_that_was_given():
    model, asked = Net(), []

    def wanted(module, name):
        asked.append((module, name))
        return module is not model.encoder[0]

    _, stats = converted(model, filter_fn=wanted)
    assert [(id(module), name) for module, name in asked] == [(id(m), name) for name, m in model.named_modules()]
    assert set(EVERY) & set(applied(stats)) == {EVERY[0], *EVERY[2:]}
    assert reasons(stats)[EVERY[1]] == "excluded by filter_fn: it covers encoder.0"
    assert stats["config"]["chosen_modules"] == [name for name, _ in model.named_modules() if name != "encoder.0"]


class Branching(nn.Module):
    """Control flow on data: only its blocks can be captured, by one graph for both."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        outputs = [block(x) for block in self.blocks]
        return outputs[0] + outputs[1] if x.sum() > 0 else outputs[2]


def test_of_parts_that_share_a_graph_only_those_wanted_are_fused(tmp_path):
    model = Branching().eval()
    fused, stats = converted(model, modules=["blocks.1"])
    others = [reason for (_, module), reason in reasons(stats).items() if not module.startswith("blocks.1")]
    assert len(others) == 2 and all(reason.startswith("excluded by modules=") for reason in others)
    loaded = kfconvert.load(kfconvert.save(fused, tmp_path / "net"), model=Branching)
    for each in (fused, loaded):
        assert applied(each.kfconvert_info()) == [("linear_relu", "blocks.1.linear")]
        assert list(each.kfconvert_info()["parts"]) == ["blocks.1"]
        torch.testing.assert_close(each(X), model(X))


def test_what_was_left_out_stays_left_out_in_a_loaded_model(tmp_path):
    torch.manual_seed(0)
    model = Net().eval()
    fused, stats = converted(model, exclude=["linear_gelu"], filter_fn=lambda module, name: name != "encoder.1")
    loaded = kfconvert.load(kfconvert.save(fused, tmp_path / "net"), model=Net)
    again = loaded.kfconvert_info()
    assert applied(again) == applied(stats) and reasons(again) == reasons(stats)
    assert again["config"] == stats["config"] == fused.kfconvert_info()["config"]
    torch.testing.assert_close(loaded(X), model(X))
    # What a filter has chosen is known without it.
    _, third = converted(model, config=ConversionConfig(**again["config"]))
    assert applied(third) == applied(stats)
    # Other options of a later conversion decide alone.
    _, last = converted(fused)
    assert applied(last) == EVERY and last["config"]["exclude"] == [] and not reasons(last)


def test_explanation_and_warning_tell_what_was_left_out():
    converter = ModelConverter(include=["linear_gelu"], exclude=["*"])
    with pytest.warns(UserWarning, match=r"fused nothing in Net: .*excluded by include=\['linear_gelu'\]"):
        converter.convert_model(Net(), example_inputs=X)
    assert "linear_relu: not fused, excluded by include=['linear_gelu']" in str(converter.explain())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["merged_linaer"]}, "exclude: no pattern is called 'merged_linaer'; did you mean 'merged_linear'"),
        ({"include": ["xyz*"]}, "include: no pattern is called 'xyz\\*'; the patterns are .*linear_gelu"),
        ({"include": [3]}, "include must be a list of names of patterns, not 3"),
        ({"filter_fn": "encoder"}, "filter_fn must be a function of a module and its name, not 'encoder'"),
        ({"config": {"effort": "fast"}}, "config must be a ConversionConfig, not {'effort': 'fast'}"),
        ({"efort": "fast"}, "there is no option 'efort'; did you mean 'effort'"),
    ],
)
def test_mistakes_are_told_in_one_line_before_the_work(options, message):
    with pytest.raises(ConversionError, match=f"^{message}") as error:
        ModelConverter(**options)
    assert "\n" not in str(error.value)


def test_mistakes_about_the_model_are_told_in_one_line():
    with pytest.raises(ConversionError, match=r"^modules: Net has no module 'enc\.\*'"):
        converted(Net(), modules=["enc.*"])
    with pytest.raises(ConversionError, match=r"^modules: Net has no module 'encodr\.\*'; did you mean 'encoder'"):
        converted(Net(), modules=["encodr.*"])
    with pytest.raises(ConversionError, match=r"^filter_fn\(Net, ''\) raised IndexError: list index out of range"):
        converted(Net(), filter_fn=lambda module, name: name.split(".")[1] == "0")


def test_the_options_of_both_functions_are_those_of_the_configuration():
    for function in (ModelConverter, auto_convert_model):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in ConversionConfig.model_fields} == dict(ConversionConfig())
        assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    config = ConversionConfig(effort="fast", exclude=["linear_gelu"])
    assert ModelConverter(config, effort="full").config == config.changed(effort="full")
