"""``kfconvert.export``: programs with the fused operators, in which free sizes are free, and which load again."""

import copy

import pytest
import torch
from support.selection import exhaustive
from support.small_models import MAKERS, convert, converted, inputs_of
from torch import nn

import kfconvert


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def ours(program):
    return [node for node in program.graph.nodes if str(node.target).startswith("kfconvert.")]


def tensors(outputs):
    return list(outputs.values()) if isinstance(outputs, dict) else [outputs]


def assert_alike(program, model, inputs):
    torch.testing.assert_close(tensors(program(**inputs)), tensors(model(**inputs)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, *exhaustive(2)])
def test_a_written_program_has_the_operators_and_free_sizes(make, batch, tmp_path):
    model, path = make(), tmp_path / "model.pt2"
    program = kfconvert.export(converted(make), inputs_of(model, batch), path)
    assert ours(program) and ours(torch.export.load(path))
    again = torch.export.load(path).module()
    for size in (1, 2, 5):
        assert_alike(again, model, inputs_of(model, size))
    if "input_ids" in inputs_of(model):
        assert_alike(again, model, {"input_ids": torch.randint(3, 60, (2, 11))})


def test_a_program_has_the_gradients_of_the_original(make):
    model, inputs = make(), inputs_of(make())
    program = kfconvert.export(converted(make), inputs).module()
    for call in (program, model):
        tensors(call(**inputs))[0].square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_arguments_of_one_batch_and_sequence_stay_so():
    model, ids = MAKERS["bert"](), torch.randint(3, 60, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [1]])).long()
    fused = convert(model, example_inputs={"input_ids": ids, "attention_mask": mask}, effort="fast")
    program = kfconvert.export(fused, {"input_ids": ids[:1], "attention_mask": mask[:1]}).module()
    assert_alike(program, model, {"input_ids": ids, "attention_mask": mask})
    with pytest.raises(Exception, match="attention_mask"):
        program(input_ids=ids, attention_mask=mask[:2])


def test_it_is_called_as_the_example():
    model, fused = MAKERS["cnn"](), converted(MAKERS["cnn"])
    x = inputs_of(model)["x"]
    for example in (x, (x,)):
        torch.testing.assert_close(kfconvert.export(fused, example).module()(x), model(x), rtol=1e-4, atol=1e-5)


def in_train_mode(fused):
    fused.train()


def with_a_hook(fused):
    fused.conv1.register_forward_hook(lambda *_: None)


X = torch.zeros(2, 3, 12, 12)
REFUSED = {
    "not converted": (None, X, "Sequential: it was not converted as a whole"),
    "train mode": (in_train_mode, X, "is in train mode"),
    "a hook": (with_a_hook, X, "conv1 has hooks"),
    "another size": (lambda fused: None, X[..., :8], "has size 8 in dimension 3"),
    "another argument": (lambda fused: None, {"y": X}, r"other arguments than \(x\)"),
    "no tensors": (lambda fused: None, None, "exactly one of"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exported_is_refused_in_one_line(what, tmp_path):
    change, example, message = REFUSED[what]
    fused = nn.Sequential(nn.ReLU())
    if change is not None:
        fused = copy.deepcopy(converted(MAKERS["cnn"]))
        change(fused)
    with pytest.raises(kfconvert.ArtifactError, match=message) as refusal:
        kfconvert.export(fused, example, tmp_path / "model.pt2")
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


class Branches(nn.Module):
    """Of one row it makes something else."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return nn.functional.gelu(y) if x.shape[0] > 1 else torch.relu(y)


def test_a_program_refuses_a_row_where_the_model_makes_something_else_of_it(tmp_path):
    model = Branches().eval()
    fused = kfconvert.ModelConverter(select="all").convert_model(model, (4, 8))
    program = kfconvert.export(fused, torch.randn(4, 8), tmp_path / "model.pt2")
    for runs in (program, torch.export.load(tmp_path / "model.pt2"), program.run_decompositions()):
        x = torch.randn(2, 8)
        torch.testing.assert_close(runs.module()(x), model(x))
        with pytest.raises(RuntimeError, match="dimension 0 of x must be at least 2"):
            runs.module()(x[:1])


class WritesToAView(nn.Module):
    """Where the images are channels-last, it writes to a copy, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        y.flatten(1)[:, :40] = 0
        return nn.functional.gelu(y)


def test_a_program_refuses_a_layout_of_which_the_model_makes_something_else():
    model, x = WritesToAView().eval(), torch.randn(2, 3, 6, 6)
    fused = kfconvert.ModelConverter(select="all").convert_model(model, example_inputs=x)
    runs = kfconvert.export(fused, x).module()
    with torch.no_grad():
        torch.testing.assert_close(runs(x), model(x))
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            runs(x.to(memory_format=torch.channels_last))


def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path):
    fused = converted(MAKERS["cnn"])
    with pytest.raises(kfconvert.ArtifactError, match="cannot write") as refusal:
        kfconvert.export(fused, X, tmp_path / "nowhere" / "model.pt2")
    assert "\n" not in str(refusal.value)


@pytest.mark.exhaustive
def test_a_package_of_aotinductor_runs_on_the_operators(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).eval()
    fused = kfconvert.ModelConverter(select="all").convert_model(model, input_shape=(2, 8))
    program = kfconvert.export(fused, torch.randn(2, 8))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    run = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for batch in (1, 2, 5):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
