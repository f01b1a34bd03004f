"""What a forward reaches that is not its model's: objects in functions' arguments, modules outside of the tree."""

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import multiprocessing
import operator
import os
import queue
import threading
import types
import weakref

import numpy
import pydantic
import pytest
import torch
from torch import is_grad_enabled, nn
from torch import is_grad_enabled as asked_for_gradients
from torch.utils.checkpoint import checkpoint

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 8)


class Settings:
    kind = None

    def __init__(self, scale=2.0):
        self.scale = scale
        self.inner = None


class Kind:
    scale = 2.0


class Mode(enum.Enum):
    FAST = 1

    def __init__(self, _):
        self.scale = 2.0


class Act(nn.Module):
    """Without parameters: nothing of it shows among the weights."""

    def __init__(self):
        super().__init__()
        self.scale, self.settings, self.scales = 2.0, Settings(), [2.0]

    def forward(self, x):
        return torch.relu(x) * self.scale * self.settings.scale * self.scales[0]


def scaled(settings, x):
    return x * settings.scale


def scaled_by_name(x, settings):
    return x * settings.scale


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0


class Outer:
    class inner:  # noqa: N801  # as classes of settings are written
        scale = 2.0
        scales = [2.0]  # noqa: RUF012


class Listing(list):
    pass


class Factors(nn.Module):
    """A module that no model holds."""

    SCALE = 2.0

    @staticmethod
    def factor():
        return Factors.SCALE


class Inherited(Settings):
    pass


class Dotted(dict):
    def get(self, name):  # of another signature than that of dict
        return self[name].scale


class Extra(pydantic.BaseModel):
    model_config = {"extra": "allow"}


@functools.singledispatch
def dispatched(value):
    return 2.0


def flag(name):
    return float(os.environ.get(name, "2.0"))


class Stored:
    """Its attributes lie in a dict of its own, as those of some classes of settings do."""

    def __init__(self, **values):
        object.__setattr__(self, "_fields", values)

    def __getattr__(self, name):
        if name.startswith("__") or name not in self.__dict__.get("_fields", {}):
            raise AttributeError(name)
        return self._fields[name]

    def __setattr__(self, name, value):
        self._fields[name] = value


@functools.lru_cache
def settings():
    return Settings()


@functools.cache
def settings_by_name(name):
    return Settings()


def listing():
    held = Listing()
    held.scale = 2.0
    return held


def python_module(name, **values):
    module = types.ModuleType(name)
    vars(module).update(values)
    return module


GLOBAL_ACT = Act()
GLOBAL_SETTINGS = Settings()
GLOBAL_SETTINGS.inner = Settings()
REGISTRY = {"a": Settings()}
NESTED = ([Settings()],)
GLOBAL_SLOTS, GLOBAL_LISTING = Slots(), listing()
ARRAY, QUEUE, BYTES, DEQUE = numpy.array([2.0]), queue.Queue(), bytearray([2]), collections.deque([2.0])
SHARED, PROXY = multiprocessing.Value("d", 2.0), types.MappingProxyType({"a": Settings()})
CONTEXT = contextvars.ContextVar("CONTEXT", default=Settings())
EVENT, TEMPERATURE = threading.Event(), torch.tensor(2.0)
QUEUE.put(2.0)
OVERRIDES, ACTIVE, DOTTED = {"other": 1.0}, weakref.WeakSet(), Dotted(a=Settings())
KEPT, HOLDER, EQUAL = Settings(), types.SimpleNamespace(scales=[2.0]), {"a": [2.0]}
OBJECTS = collections.deque([Settings()])
SIBLING = python_module("project.config", SCALE=2.0)
PACKAGE, MODULES = python_module("project.models", config=SIBLING), {"c": python_module("project.other", SCALE=2.0)}


class Net(nn.Module):
    act = Act()

    def __init__(self, way, held=None):
        super().__init__()
        self.linear, self.way, self.held = nn.Linear(8, 8), way, held

    def forward(self, x):
        return WAYS[self.way][1](self, torch.relu(self.linear(x)))


def closing(module):
    return lambda x: module(x)


def with_attribute():
    def scale(x):
        return x * scale.settings.scale

    scale.settings = Settings()
    return scale


def with_default(module):
    def run(x, act=module):
        return act(x)

    return run


# What the model holds, and what its forward does with that.
WAYS = {
    "argument of a partial function": (
        lambda: functools.partial(scaled, Settings()),
        lambda m, x: m.held(x),
        lambda m: m.held.args[0],
    ),
    "keyword of a partial function": (
        lambda: functools.partial(scaled_by_name, settings=Settings()),
        lambda m, x: m.held(x),
        lambda m: m.held.keywords["settings"],
    ),
    "member of an enum": (lambda: Mode.FAST, lambda m, x: x * m.held.scale, lambda m: m.held),
    "class in an object": (
        lambda: types.SimpleNamespace(inner=types.SimpleNamespace(kind=Kind)),
        lambda m, x: x * m.held.inner.kind.scale,
        lambda m: m.held.inner.kind,
    ),
    "weak reference": (
        lambda: (settings := Settings(), weakref.ref(settings)),
        lambda m, x: x * m.held[1]().scale,
        lambda m: m.held[0],
    ),
    "weak dictionary": (
        lambda: (settings := Settings(), weakref.WeakValueDictionary(a=settings)),
        lambda m, x: x * m.held[1]["a"].scale,
        lambda m: m.held[0],
    ),
    "object in a global object": (
        lambda: None,
        lambda m, x: x * GLOBAL_SETTINGS.inner.scale,
        lambda m: GLOBAL_SETTINGS.inner,
    ),
    "object in a global dict": (lambda: None, lambda m, x: x * REGISTRY["a"].scale, lambda m: REGISTRY["a"]),
    "object in nested containers": (lambda: None, lambda m, x: x * NESTED[0][0].scale, lambda m: NESTED[0][0]),
    "slots of a global object": (lambda: None, lambda m, x: x * GLOBAL_SLOTS.scale, lambda m: GLOBAL_SLOTS),
    "attribute of a list": (listing, lambda m, x: x * m.held.scale, lambda m: m.held),
    "attribute of a global list": (lambda: None, lambda m, x: x * GLOBAL_LISTING.scale, lambda m: GLOBAL_LISTING),
    "class in a class": (lambda: None, lambda m, x: x * Outer.inner.scale, lambda m: Outer.inner),
    "answer from a cache": (lambda: None, lambda m, x: x * settings().scale, lambda m: settings()),
    "answer by name": (lambda: None, lambda m, x: x * settings_by_name("a").scale, lambda m: settings_by_name("a")),
    "attributes in a dict": (lambda: Stored(scale=2.0), lambda m, x: x * m.held.scale, lambda m: m.held),
    "object in a proxy": (lambda: None, lambda m, x: x * PROXY["a"].scale, lambda m: PROXY["a"]),
    "named attribute": (
        lambda: Settings(),
        lambda m, x: x * operator.attrgetter("held.scale")(m),
        lambda m: m.held,
    ),
    "value of a context variable": (lambda: None, lambda m, x: x * CONTEXT.get().scale, lambda m: CONTEXT.get()),
    "object in an attribute of a function": (with_attribute, lambda m, x: m.held(x), lambda m: m.held.settings),
    "evaluated text": (lambda: None, lambda m, x: eval("x * GLOBAL_SETTINGS.scale"), lambda m: GLOBAL_SETTINGS),
    "module in the globals": (lambda: None, lambda m, x: GLOBAL_ACT(x), lambda m: GLOBAL_ACT),
    "module of the class": (lambda: None, lambda m, x: m.act(x), lambda m: m.act),
    "module in a closure": (
        lambda: closing(Act()),
        lambda m, x: m.held(x),
        lambda m: m.held.__closure__[0].cell_contents,
    ),
    "module as a default": (lambda: with_default(Act()), lambda m, x: m.held(x), lambda m: m.held.__defaults__[0]),
    "module in a list": (lambda: [Act()], lambda m, x: m.held[0](x), lambda m: m.held[0]),
    "module in a tree in a list": (
        lambda: [nn.Sequential(nn.Identity(), Act())],
        lambda m, x: m.held[0](x),
        lambda m: m.held[0][1],
    ),
    "module in an object": (
        lambda: types.SimpleNamespace(act=Act()),
        lambda m, x: m.held.act(x),
        lambda m: m.held.act,
    ),
    "bound method": (lambda: Act().forward, lambda m, x: m.held(x), lambda m: m.held.__self__),
    "user list of modules": (
        lambda: collections.UserList([Act()]),
        lambda m, x: m.held[0](x),
        lambda m: m.held[0],
    ),
}


def set_scale(holder):
    holder.scale = 3.0


def set_inner(holder):
    holder.settings.scale = 3.0


def set_in_list(holder):
    holder.scales[0] = 3.0


def _cases():
    for way in WAYS:
        yield way, set_scale
        if "module" in way or way == "bound method":
            yield way, set_inner
            yield way, set_in_list


def twins(way):
    """An original and a converted model, which share only what is no model's own."""
    torch.manual_seed(0)
    models = [Net(way, WAYS[way][0]()).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1] = ModelConverter(select="all").convert_model(models[1], example_inputs=X, inplace=True)
    return models


def hits(model):
    return model.kfconvert_info()["guard"]["hits"]


@pytest.mark.parametrize(("way", "change"), list(_cases()))
@torch.no_grad()
def test_a_change_of_what_is_reached(way, change):
    models = twins(way)
    before = models[0](X)
    torch.testing.assert_close(models[1](X), before)
    assert hits(models[1]) == 1
    shared = WAYS[way][2](models[0]) is WAYS[way][2](models[1])
    holders = [WAYS[way][2](model) for model in models[: 1 if shared else 2]]
    kept = [(holder, "scale", holder.scale) for holder in holders]
    try:
        for holder in holders:
            change(holder)
        for _ in range(2):
            torch.testing.assert_close(models[1](X), models[0](X))
        assert not torch.allclose(models[0](X), before)
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)
            if isinstance(holder, Act):
                holder.settings.scale = holder.scales[0] = 2.0


# What a forward multiplies by, and changes there and back.
READ = {
    "global array": (lambda: float(ARRAY[0]), lambda v: ARRAY.__setitem__(0, v)),
    "global deque": (lambda: DEQUE[0], lambda v: DEQUE.__setitem__(0, v)),
    "global bytes": (lambda: BYTES[0], lambda v: BYTES.__setitem__(0, int(v))),
    "global queue": (lambda: QUEUE.queue[0], lambda v: QUEUE.queue.__setitem__(0, v)),
    "global event": (lambda: 3.0 if EVENT.is_set() else 2.0, lambda v: EVENT.set() if v == 3.0 else EVENT.clear()),
    "shared value": (lambda: SHARED.value, lambda v: setattr(SHARED, "value", v)),
    "element of a global tensor": (lambda: TEMPERATURE.item(), lambda v: TEMPERATURE.fill_(v)),
    "list in a class in a class": (lambda: Outer.inner.scales[0], lambda v: Outer.inner.scales.__setitem__(0, v)),
    "sibling of a Python module": (lambda: PACKAGE.config.SCALE, lambda v: setattr(SIBLING, "SCALE", v)),
    "Python module in a dict": (lambda: MODULES["c"].SCALE, lambda v: setattr(MODULES["c"], "SCALE", v)),
    "class attribute of a module's class": (lambda: Factors.SCALE, lambda v: setattr(Factors, "SCALE", v)),
    "static method of a module's class": (lambda: Factors.factor(), lambda v: setattr(Factors, "SCALE", v)),
    "variable by a helper": (lambda: flag("SCALE_OF_IT"), lambda v: os.environ.__setitem__("SCALE_OF_IT", str(v))),
    "new key of a dict": (lambda: OVERRIDES.get("name", 2.0), lambda v: OVERRIDES.__setitem__("name", v)),
    "member of a weak set": (
        lambda: 3.0 if KEPT in ACTIVE else 2.0,
        lambda v: ACTIVE.add(KEPT) if v == 3.0 else ACTIVE.discard(KEPT),
    ),
    "object in a deque": (lambda: OBJECTS[0].scale, lambda v: setattr(OBJECTS[0], "scale", v)),
    "dict with a get of its own": (lambda: DOTTED.get("a"), lambda v: setattr(DOTTED["a"], "scale", v)),
    "function by class": (
        lambda: dispatched(1),
        lambda v: dispatched.register(int, lambda _: v),
    ),
    "another answer": (
        lambda: settings().scale,
        lambda v: (settings.cache_clear(), setattr(settings(), "scale", v)),
    ),
}


class Reading(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name

    def forward(self, x):
        return torch.relu(self.linear(x)) * READ[self.name][0]()


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_a_change_in_the_globals(name):
    model = Reading(name).eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    before = model(X)
    torch.testing.assert_close(fused(X), before)
    assert hits(fused) == 1
    READ[name][1](3.0)
    try:
        torch.testing.assert_close(fused(X), model(X))
        assert not torch.allclose(model(X), before)
    finally:
        READ[name][1](2.0)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.name, self.extra, self.act = nn.Linear(8, 8), "mine", Extra(scale=2.0), Inherited()

    def forward(self, x):
        y = torch.relu(self.linear(x)) * OVERRIDES.get(self.name, 1.0)
        return y * self.extra.scale * (self.act.kind or 1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: OVERRIDES.__setitem__("mine", 4.0),
        lambda m: setattr(m.extra, "scale", 3.0),
        lambda m: setattr(Inherited, "kind", 5.0),
    ],
)
@torch.no_grad()
def test_keys_extra_fields_and_inherited_attributes(change):
    model = Named().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    before = model(X)
    torch.testing.assert_close(fused(X), before)
    try:
        for each in (model, fused):
            change(each)
        torch.testing.assert_close(fused(X), model(X))
        assert not torch.allclose(model(X), before)
    finally:
        OVERRIDES.pop("mine", None)
        if "kind" in vars(Inherited):
            del Inherited.kind


class Dispatching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * dispatched(len(ACTIVE))


@torch.no_grad()
def test_caches_of_functions_by_class_and_of_weak_sets_are_no_changes():
    fused = ModelConverter(select="all").convert_model(Dispatching().eval(), example_inputs=X)
    dispatched(2.5)
    other = Settings()
    ACTIVE.add(other)
    del other
    fused(X)
    fused(X)
    assert hits(fused) == 2


@pytest.mark.parametrize("where", ["global", "class", "object"])
@torch.no_grad()
def test_an_equal_container_that_is_changed_later(where, monkeypatch):
    class Net(nn.Module):
        scales = [2.0]  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            held = {"global": EQUAL["a"], "class": Net.scales, "object": HOLDER.scales}[where]
            return torch.relu(self.linear(x)) * held[0]

    model = Net().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    torch.testing.assert_close(fused(X), model(X))
    replace = {
        "global": lambda: monkeypatch.setitem(EQUAL, "a", [2.0]) or EQUAL["a"],
        "class": lambda: setattr(Net, "scales", [2.0]) or Net.scales,
        "object": lambda: monkeypatch.setattr(HOLDER, "scales", [2.0]) or HOLDER.scales,
    }
    container = replace[where]()
    torch.testing.assert_close(fused(X), model(X))
    assert hits(fused) == 2
    container[0] = 3.0
    torch.testing.assert_close(fused(X), model(X))
    assert hits(fused) == 2


def test_settings_with_a_setattr_of_their_own_are_left_alone():
    model = Net("attributes in a dict", Stored(scale=2.0)).eval()
    ModelConverter(select="all").convert_model(model, example_inputs=X, inplace=True)
    assert model.held._fields == {"scale": 2.0} and type(model.held) is Stored


class Asking(nn.Module):
    ask = staticmethod(is_grad_enabled)

    def __init__(self, way):
        super().__init__()
        self.linear, self.way, self.asked = nn.Linear(8, 8), way, {"a": torch.is_inference_mode_enabled}

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y * 2 if ASKING[self.way](self) else y


ASKING = {
    "imported": lambda m: is_grad_enabled(),
    "under another name": lambda m: asked_for_gradients(),
    "of the class": lambda m: m.ask(),
    "by name": lambda m: getattr(torch, "is_grad_enabled")(),  # noqa: B009
}


@pytest.mark.parametrize("way", ASKING)
def test_a_question_for_gradients(way):
    model = Asking(way).eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(fused(X), model(X))


class Held(Asking):
    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y * 2 if self.asked["a"]() else y


def test_a_question_that_a_dict_holds():
    model = Held("").eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(fused(X), model(X))


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * (2 if isinstance(x, nn.Parameter) else 1)


@torch.no_grad()
def test_the_class_of_an_argument():
    model = Classes().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    for x in (X, nn.Parameter(X, requires_grad=False), X):
        torch.testing.assert_close(fused(x), model(x))
    assert hits(fused) == 2


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return torch.relu(self.linear(x)) * len(str(self.scale))


@torch.no_grad()
def test_the_text_of_a_buffer():
    model = Told().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    for value in (1.0, 0.123, 3e10):
        for each in (model, fused):
            each.scale.fill_(value)
        torch.testing.assert_close(fused(X), model(X))


@pytest.mark.parametrize(
    "layout", [lambda w: w.t(), lambda w: w.view(8, 8).flip(0).t().t(), lambda w: w[:, [1, 0, *range(2, 8)]]]
)
@torch.no_grad()
def test_weights_that_lie_otherwise_at_the_same_place(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each[0].weight.data = layout(each[0].weight.data)
    torch.testing.assert_close(fused(X), model(X))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x)


@pytest.mark.parametrize("strategy", ["merged", "mkl"])
@torch.no_grad()
def test_a_transposed_weight_among_merged_ones(strategy, monkeypatch):
    monkeypatch.setattr("kfconvert.modules.linear.HAS_MKL", strategy == "mkl")
    monkeypatch.setattr("kfconvert.modules.linear.MKL_MIN_WEIGHT_BYTES", 0)
    x = torch.randn(2, 20, 16)
    model = Projections().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x)
    torch.testing.assert_close(fused(x), model(x))
    for each in (model, fused):
        each.k.weight.data = each.k.weight.data.t()
    torch.testing.assert_close(fused(x), model(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda y: torch.relu(self.linear(y)), x, use_reentrant=True) * 2


def test_a_reentrant_checkpoint():
    model = Checkpointed().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    grads = []
    for each in (model, fused):
        x = X.clone().requires_grad_()
        each(x).sum().backward()
        grads.append((x.grad, each.linear.weight.grad))
    torch.testing.assert_close(grads[1], grads[0])


class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)), torch.arange(4)


@torch.no_grad()
def test_another_default_device():
    model = Made().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    assert fused(X)[1].device.type == "cpu"
    with torch.device("meta"):
        assert fused(X)[1].device == model(X)[1].device == torch.device("meta")
    assert hits(fused) == 1 and fused(X)[1].device.type == "cpu" and hits(fused) == 2


@torch.no_grad()
def test_the_forward_of_a_class_in_a_list_is_patched(monkeypatch):
    models = twins("module in a list")
    torch.testing.assert_close(models[1](X), models[0](X))
    monkeypatch.setattr(Act, "forward", lambda self, x: x - 1)
    torch.testing.assert_close(models[1](X), models[0](X))


class Normed(nn.Module):
    def forward(self, x):
        return BATCH_NORM(x) + DROPOUT(x) + LEAKY(x)


BATCH_NORM, DROPOUT, LEAKY = nn.BatchNorm1d(8, affine=False).eval(), nn.Dropout(0.5).eval(), nn.LeakyReLU()
CHANGES = {
    "slope": (lambda: setattr(LEAKY, "negative_slope", 0.5), lambda: setattr(LEAKY, "negative_slope", 0.01)),
    "eps": (lambda: setattr(BATCH_NORM, "eps", 3.0), lambda: setattr(BATCH_NORM, "eps", 1e-5)),
    "buffer": (
        lambda: setattr(BATCH_NORM, "running_mean", torch.ones(8)),
        lambda: setattr(BATCH_NORM, "running_mean", torch.zeros(8)),
    ),
    "mode": (lambda: BATCH_NORM.train(), lambda: BATCH_NORM.eval()),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_modules_of_torch_in_the_globals(change):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Normed()).eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    there, back = CHANGES[change]
    torch.testing.assert_close(fused(X), model(X))
    there()
    try:
        torch.testing.assert_close(fused(X), model(X))
    finally:
        back()
        BATCH_NORM.reset_running_stats()


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0

    @functools.lru_cache  # noqa: B019  # a model of a user's
    def twice(self):
        return self.scale * 2

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.twice()


@torch.no_grad()
def test_an_answer_from_a_cache_that_is_cleared():
    model = Cached().eval()
    fused = copy.deepcopy(model)
    for each in (model, fused):
        each(X)
    fused = ModelConverter(select="all").convert_model(fused, example_inputs=X, inplace=True)
    torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each.scale = 5.0
    Cached.twice.cache_clear()
    torch.testing.assert_close(fused(X), model(X))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Other(Plain):
    def forward(self, x):
        return self.linear(x) - 1


def copied(source):
    return copy.copy(source)


def taken_over(source, kind=Plain, without=()):
    target = kind.__new__(kind)
    target.__dict__.update({name: value for name, value in vars(source).items() if name not in without})
    return target


COPIES = {
    "copy.copy": copied,
    "replica": lambda m: m._replicate_for_data_parallel(),
    "attributes": taken_over,
    "attributes of another class": lambda m: taken_over(m, Other),
    "some attributes": lambda m: taken_over(m, Other, ("kfconvert_info", "kfconvert_refresh")),
}


@pytest.mark.parametrize("way", COPIES)
@torch.no_grad()
def test_who_shares_the_attributes_of_a_converted_model(way):
    torch.manual_seed(0)
    model = Plain().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    linear = nn.Linear(8, 8)
    twins = [COPIES[way](each) for each in (model, fused)]
    for twin in twins:
        twin.__dict__["_modules"] = {"linear": linear}
    torch.testing.assert_close(twins[1](X), twins[0](X))
    torch.testing.assert_close(fused(X), model(X))


@torch.no_grad()
def test_the_forward_of_a_shallow_copy_called_by_name():
    model = Plain().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    twins = [copy.copy(each) for each in (model, fused)]
    for twin in twins:
        twin.__dict__["_modules"] = {"linear": nn.Identity()}
        assert torch.equal(twin.forward(X), torch.relu(X))
    assert not hasattr(twins[1], "kfconvert_info") and "__getstate__" not in vars(twins[1])
    assert hits(fused) == 0 and torch.allclose(fused(X), model(X), atol=1e-5) and hits(fused) == 1
    duplicate = copy.deepcopy(fused)
    assert torch.equal(duplicate(X), fused(X)) and hits(duplicate) == 2
    twin = copy.copy(duplicate)
    twin.__dict__["_modules"] = {"linear": nn.Identity()}
    assert torch.equal(twin.forward(X), torch.relu(X))


@torch.no_grad()
def test_a_shallow_copy_of_a_model_whose_forward_was_put_on_the_instance():
    model, fused = Plain().eval(), Plain().eval()
    fused.load_state_dict(model.state_dict())
    for each in (model, fused):
        each.forward = types.MethodType(lambda self, x: torch.sigmoid(self.linear(x)), each)
    fused = ModelConverter(select="all").convert_model(fused, example_inputs=X, inplace=True)
    twins = [copy.copy(each) for each in (model, fused)]
    for twin in twins:
        twin.__dict__["_modules"] = {"linear": nn.Identity()}
    for call in (lambda m: m(X), lambda m: m.forward(X)):
        torch.testing.assert_close(call(twins[1]), call(twins[0]))
        torch.testing.assert_close(call(fused), call(model))


class Pair(nn.Module):
    """Values decide, so that its parts are captured."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Plain(), Plain()

    def forward(self, x):
        y = self.first(x)
        return y if y.abs().max() > 1e9 else self.second(y)


@torch.no_grad()
def test_the_forward_of_one_part_assigned_to_another_of_its_class():
    model = Pair().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    assert fused.kfconvert_info()["parts"]
    for each in (model, fused):
        each.second.forward = each.first.forward
    torch.testing.assert_close(fused(X), model(X))


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parents = [parent]

    def forward(self, x):
        return x * self.parents[0].scale


class Parent(nn.Module):
    """Its child refers to it without registering it."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0
        self.child = Child(self)

    def forward(self, x):
        return self.child(torch.relu(self.linear(x)))


@torch.no_grad()
def test_a_child_that_refers_to_its_parent():
    model = Parent().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    torch.testing.assert_close(fused(X), model(X))
    assert hits(fused) == 1
    for each in (model, fused):
        each.scale = 3.0
    torch.testing.assert_close(fused(X), model(X))


class Flat(nn.Module):
    """The weights of its layers are views of one parameter, and plain attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.flat = nn.LayerNorm(8), nn.Parameter(torch.randn(3 * 64 + 8))
        for index, layer in enumerate(self.layers):
            del layer.weight
            layer.weight = self.flat.detach()[64 * index : 64 * index + 64].view(8, 8)
        del self.norm.weight
        self.norm.weight = self.flat.detach()[192:]

    def forward(self, x):
        first, second, third = (layer(x) for layer in self.layers)
        return self.norm(torch.relu(first) * second + third)


@torch.no_grad()
def test_weights_that_are_plain_attributes():
    model = Flat().eval()
    fused = copy.deepcopy(model)
    for index, layer in enumerate(fused.layers):
        layer.weight = fused.flat.detach()[64 * index : 64 * index + 64].view(8, 8)
    fused.norm.weight = fused.flat.detach()[192:]
    fused = ModelConverter(select="all").convert_model(fused, example_inputs=X, inplace=True)
    torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each.flat.mul_(2)
    torch.testing.assert_close(fused(X), model(X))
