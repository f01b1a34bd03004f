"""What only the original forward of a frozen model needs lies in host memory, until it is needed."""

import copy
import functools
import gc
import pickle
import warnings

import pytest
import torch
from support import small_models
from torch import nn

import kfconvert
from kfconvert import FrozenError, ModelConverter, freeze
from kfconvert.runtime import guarded_forward
from kfconvert.runtime.dispatch.on_host import tensors_within

BACK = "CNN, which kfconvert.freeze has moved to host memory, are back on the device"


def value(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]


def call(model, inputs):
    with torch.no_grad():
        return value(model(**inputs))


def moved(model):
    """As ``freeze(model, originals="cpu")`` does for a model on a GPU: here within the memory of the host."""
    freeze(model)
    forward = guarded_forward(model)
    forward.frozen.to_host(model, [variant.program for variant in forward.variants], torch.device("cpu"))
    return model


def on_host(model):
    """The names of the tensors that lie on the host."""
    frozen = guarded_forward(model).frozen
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in tensors if frozen.on_host is not None and frozen.on_host.holds(tensor)}


@pytest.fixture
def inputs():
    return small_models.inputs_of(small_models.cnn(), batch=3, seed=1)


@pytest.fixture
def called(inputs):
    model = small_models.converted(small_models.cnn)
    call(model, inputs)
    return model


def test_folded_weights_move_and_the_first_tensor_stays(called, inputs):
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in called.state_dict().items()}
    names = on_host(moved(called))
    folded = {f"{bn}.{name}" for bn in ("bn1", "bn2") for name in ("weight", "bias", "running_mean", "running_var")}
    assert folded | {"conv2.weight", "conv2.bias"} <= names
    assert not names & {"conv1.weight", "head.bias"}  # the first one; one that is looked up in each call
    after = called.state_dict()
    for name, (address, elements) in before.items():
        assert (after[name].data_ptr() != address) == (name in names)
        assert torch.equal(after[name], elements)
    info = called.kfconvert_info()["frozen"]
    assert info["host_bytes"] == sum(t.numel() * t.element_size() for n, t in after.items() if n in names)


@pytest.mark.parametrize("make", small_models.MAKERS.values())
def test_the_program_reads_nothing_that_has_moved(make):
    original, model = make(), small_models.converted(make)
    inputs = small_models.inputs_of(original, batch=3, seed=1)
    call(model, inputs)
    expected = call(original, inputs)
    moved(model)
    for name in on_host(model):  # what is written there leaves a trace, which nobody looks for in so few calls
        dict([*model.named_parameters(), *model.named_buffers()])[name].detach().zero_()
    torch.testing.assert_close(call(model, inputs), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        call(model, small_models.inputs_of(original, batch=5)),
        call(original, small_models.inputs_of(original, batch=5)),
        rtol=1e-3,
        atol=1e-3,
    )
    assert small_models.guard(model)["misses"] == {}


def test_nobody_holds_the_memory_from_which_they_were_moved(called):
    tensors = [*called.parameters(), *called.buffers()]
    storages = [torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    names = on_host(moved(called))
    expired = [storage.expired() for storage in storages]
    assert sum(expired) == len(names) > 0


def test_a_miss_brings_them_back_once_and_says_so(called, inputs):
    original, smaller = small_models.cnn(), {"x": inputs["x"][:, :, :9]}
    moved(called)
    with pytest.warns(RuntimeWarning, match=f"{BACK} and stay there: a call runs the original forward"):
        torch.testing.assert_close(call(called, smaller), call(original, smaller))
    assert called.kfconvert_info()["frozen"] == {"host_bytes": 0} and not on_host(called)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(call(called, smaller), call(original, smaller))
        for _ in range(200):
            torch.testing.assert_close(call(called, inputs), call(original, inputs), rtol=1e-3, atol=1e-3)
    assert small_models.guard(called)["hits"] == 201
    assert on_host(moved(called))


@pytest.mark.parametrize(
    "need, reason",
    [
        (lambda m, x: m(x).sum().backward(), "a call runs the original forward"),
        (lambda m, x: m(x.to(memory_format=torch.channels_last)), "inputs with a new layout read them"),
        (lambda m, x: kfconvert.export(m, x), "it is exported"),
        (lambda m, x: torch.jit.trace(m, x), "a compiler reads them"),
        (lambda m, x: torch.compile(m, backend="eager")(x), "a compiler reads them"),
        (lambda m, x: copy.copy(m), "a shallow copy"),
        (lambda m, x: small_models.convert(m, inplace=True, example_inputs=x), "the model is being converted again"),
    ],
    ids=["gradients", "layout", "export", "trace", "compile", "copy", "convert"],
)
def test_whoever_needs_them_brings_them_back(called, inputs, need, reason):
    original = small_models.cnn()
    moved(called)
    with pytest.warns(RuntimeWarning, match=f"{BACK} and stay there: {reason}"):
        with torch.set_grad_enabled(reason.startswith("a call")):
            need(called, inputs["x"])
    assert not called.kfconvert_info()["frozen"] or not called.kfconvert_info()["frozen"]["host_bytes"]
    for ours, theirs in zip(called.state_dict().values(), original.state_dict().values()):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(call(called, inputs), call(original, inputs), rtol=1e-3, atol=1e-3)


def test_a_part_that_is_called_by_itself_brings_them_back():
    original, model = small_models.bert(), small_models.converted(small_models.bert)
    call(model, small_models.inputs_of(original))
    assert on_host(moved(model))
    inputs = {"hidden_states": torch.randn(2, 7, 32)}
    part, other = (each.bert.encoder.layer[0].intermediate for each in (model, original))
    with pytest.warns(RuntimeWarning, match="a submodule was called on its own"):
        torch.testing.assert_close(call(part, inputs), call(other, inputs), rtol=1e-3, atol=1e-3)


def test_export_that_began_without_them_is_an_error(called, inputs):
    moved(called)
    with pytest.raises(FrozenError, match="use kfconvert.export"):
        torch.export.export(called, (), inputs)


def test_gradients_are_those_of_the_original(called, inputs):
    original = small_models.cnn()
    moved(called)
    with pytest.warns(RuntimeWarning, match=BACK):
        called(**inputs).sum().backward()
    original(**inputs).sum().backward()
    for ours, theirs in zip(called.parameters(), original.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("duplicated", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_has_all_tensors_on_its_device_and_leaves_those_of_the_model(called, inputs, duplicated, monkeypatch):
    names = on_host(moved(called))
    to_device = []
    monkeypatch.setattr(kfconvert.runtime.dispatch.on_host, "_move", lambda tensors, device: to_device.extend(tensors))
    duplicate = duplicated(called)
    assert on_host(called) == names
    tensors = dict([*duplicate.named_parameters(), *duplicate.named_buffers()])
    assert {name for name, tensor in tensors.items() if any(tensor is each for each in to_device)} == names
    assert len(to_device) == len(names)
    assert all(p is not q for p, q in zip(called.parameters(), duplicate.parameters()))
    for ours, theirs in zip(duplicate.state_dict().values(), called.state_dict().values()):
        assert torch.equal(ours, theirs)
    assert_alike_and_free(duplicate, inputs)


def assert_alike_and_free(model, inputs):
    torch.testing.assert_close(call(model, inputs), call(small_models.cnn(), inputs), rtol=1e-3, atol=1e-3)
    model.head = nn.Linear(8, 5)
    model.train()


def test_changes_of_what_has_moved_are_errors(called, inputs):
    moved(called)
    assert called.to("cpu") is called  # it is there
    called.bn1.running_mean.add_(1)
    with pytest.raises(FrozenError, match="a weight or buffer was replaced or written"):
        for _ in range(200):
            call(called, inputs)


def test_it_must_have_been_called():
    model = small_models.converted(small_models.cnn)
    with pytest.raises(FrozenError, match="no program of CNN has run yet: call it"):
        moved(model)
    call(model, small_models.inputs_of(model))
    assert on_host(moved(model))


def test_on_the_cpu_nothing_moves(called):
    assert freeze(called, originals="cpu").kfconvert_info()["frozen"] == {"host_bytes": 0}


def test_tensors_that_others_may_look_at_stay(called, inputs):
    called.bn1.weight.grad = torch.zeros(8)
    view = called.bn1.bias.detach()
    array = called.bn2.weight.detach().numpy()
    assert not on_host(moved(called)) & {"bn1.weight", "bn1.bias", "bn2.weight"}
    assert view.data_ptr() == called.bn1.bias.data_ptr() and array.ctypes.data == called.bn2.weight.data_ptr()


def test_models_that_were_converted_in_parts_keep_theirs():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_models.CNN().eval()

        def forward(self, x):
            return self.inner(x) if x.mean() > 0 else self.inner(-x)

    model = small_models.convert(Outer().eval(), example_inputs=torch.rand(2, 3, 12, 12))
    assert guarded_forward(model) is None and guarded_forward(model.inner) is not None
    freeze(model, originals="cpu")
    assert model.kfconvert_info()["frozen"] == {"host_bytes": 0}
    with pytest.raises(FrozenError, match="Outer was frozen"):
        model.train()(torch.rand(2, 3, 12, 12))


def test_tensors_are_found_wherever_a_plan_holds_them():
    a, b, c, d, e = (torch.zeros(1) for _ in range(5))

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def method(self):
            pass

    holder = Holder()
    values = [
        functools.partial(torch.add, a, other=b),
        lambda x=c: x + d,
        {"key": [(e,)]},
        holder.method,
        torch.ops.aten.add.Tensor,
    ]
    found = tensors_within(values)
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in (a, b, c, d, e, holder.weight)}


def resnet50():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    return torchvision.models.resnet50().cuda().half().eval()


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.cuda
def test_on_a_gpu_the_originals_of_a_resnet_take_host_memory():
    original = resnet50()
    x = torch.randn(2, 3, 224, 224, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = original(x).cpu()
    del original
    first, before = resnet50(), allocated()
    weights = sum(t.numel() * t.element_size() for t in first.state_dict().values())
    model = ModelConverter(select="all", cuda_graphs=False).convert_model(first, example_inputs=x, inplace=True)
    with torch.no_grad():
        model(x)
        freeze(model, originals="cpu")
        after = allocated()
        assert after - before <= 0.05 * weights
        assert model.kfconvert_info()["frozen"]["host_bytes"] > 0.5 * weights
        assert next(model.parameters()).is_cuda
        torch.testing.assert_close(model(x).cpu(), expected, rtol=2e-2, atol=2e-2)
        assert list(copy.deepcopy(model).state_dict().values())[1].is_cuda
        with pytest.warns(RuntimeWarning, match="are back on the device"):
            model(x[:, :, :192, :192])
    assert all(tensor.is_cuda for tensor in model.state_dict().values())


@pytest.mark.cuda
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("make", small_models.MAKERS.values())
def test_on_a_gpu_calls_go_on_and_misses_are_right(make, cuda_graphs):
    original = make().cuda()
    inputs = {name: tensor.cuda() for name, tensor in small_models.inputs_of(original).items()}
    model = ModelConverter(select="all", cuda_graphs=cuda_graphs).convert_model(original, example_inputs=inputs)
    expected = call(original, inputs)
    for _ in range(3):
        call(model, inputs)
    freeze(model, originals="cpu")
    for _ in range(250):
        torch.testing.assert_close(call(model, inputs), expected, rtol=1e-3, atol=1e-3)
    assert (model.kfconvert_info()["cuda_graphs"]["replayed"] > 200) == cuda_graphs
    with warnings.catch_warnings(), torch.autocast("cuda", torch.bfloat16):
        warnings.simplefilter("ignore")
        torch.testing.assert_close(call(model, inputs), call(original, inputs))
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    torch.testing.assert_close(call(model, inputs), expected, rtol=1e-3, atol=1e-3)
    freeze(model, originals="cpu")
    torch.testing.assert_close(call(model, inputs), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "need",
    [
        lambda m, x: torch.compile(m, backend="eager")(x),
        lambda m, x: torch.jit.trace(m, x),
        lambda m, x: kfconvert.export(m, x),
        lambda m, x: m(x.to(memory_format=torch.channels_last)),
    ],
    ids=["compile", "trace", "export", "layout"],
)
def test_on_a_gpu_whoever_needs_them_brings_them_back(need):
    original = small_models.cnn().cuda()
    x = torch.randn(4, 3, 12, 12, device="cuda")
    model = ModelConverter(select="all").convert_model(original, example_inputs=x)
    with torch.no_grad():
        model(x)
        freeze(model, originals="cpu")
        with pytest.warns(RuntimeWarning, match=BACK):
            need(model, x)
        assert all(tensor.is_cuda for tensor in model.state_dict().values())
        torch.testing.assert_close(model(x), original(x), rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
def test_on_a_gpu_a_call_that_was_never_made_is_recorded_after_the_move():
    original = small_models.cnn().cuda()
    x = torch.randn(4, 3, 12, 12, device="cuda")
    model = ModelConverter(select="all", cuda_graphs=True).convert_model(original, example_inputs=x)
    with torch.no_grad():
        model(x)
        freeze(model, originals="cpu")
        for rows in (4, 7):
            y = torch.randn(rows, 3, 12, 12, device="cuda")
            for _ in range(4):
                torch.testing.assert_close(model(y), original(y), rtol=1e-3, atol=1e-3)
    assert model.kfconvert_info()["cuda_graphs"]["recordings"] == 2
    assert small_models.guard(model)["misses"] == {}
