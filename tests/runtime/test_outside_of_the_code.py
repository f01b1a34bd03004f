"""State that lies beside the code: items of dicts of all kinds, names that are not there yet, a larger model."""

import builtins
import collections
import dataclasses
import gc
import operator
import os
import sys
import threading
import types
import weakref

import pytest
import torch
import transformers
from support import small_models
from torch import nn

pytestmark = [pytest.mark.filterwarnings("ignore:kfconvert"), pytest.mark.usefixtures("small_heap")]
X = torch.randn(3, 8)
ADAPTERS, BY_NUMBER, ORDERED = {"a": 1.0}, {0: 1.0}, collections.OrderedDict(a=1.0, b=2.0)
BY_CLASS = {"Other": 1.0}
NESTED, KEYWORDS, TABLE, LISTED = {"inner": {"other": 1}}, {"one": 1.0}, {"k": 1.0}, [1.0]
GET, VALUES, ITEM = TABLE.get, TABLE.values(), LISTED.__getitem__
MEMORY = {0: 1.0}


class Settings:
    table = {"a": 1.0}  # noqa: RUF012  # as people write it

    def __init__(self):
        self.own = {"a": 1.0}


SETTINGS, MODULE = Settings(), types.ModuleType("project.settings")
PROXIED = Settings()
PROXIED.scale = 1.0
PROXY = weakref.proxy(PROXIED)


def closing(held):
    return lambda: sum(held.values())


CLOSED = {"a": 1.0}
CLOSURE = closing(CLOSED)
DEFAULTED = {"a": 1.0}


def with_default(held=DEFAULTED):
    return sum(held.values())


def of_keywords(**given):
    return sum(given.values())


def remembered(key):
    MEMORY[key] = MEMORY.get(key, 1.0)
    return MEMORY[key]


def named():
    try:
        return THERE_LATER
    except NameError:
        return 1.0


def of_the_class():
    try:
        return Settings.scale
    except AttributeError:
        return 1.0


FACTOR, DEFAULTS, KEPT, LOCAL = {"x": 1.0}, {}, [], threading.local()
LOCAL.held = types.SimpleNamespace(scale=1.0)


class Mapped(dict):
    def scale(self):
        return FACTOR["x"]


class Slotted:
    __slots__ = ("held",)

    def scale(self):
        return FACTOR["x"]


class Items:
    amount = 1.0

    @classmethod
    def of_class(cls):
        return cls.amount

    held = {"scale": 1.0}  # noqa: RUF012

    def __class_getitem__(cls, key):
        return cls.held[key]


class Behind:
    def own_factor(self):
        return 1.0


class Mixin:
    pass


class Layered(Mixin, Behind):
    def factor(self):
        return super().own_factor()


class Single:
    one = None

    def __new__(cls):
        if cls.one is None:
            cls.one = object.__new__(cls)
            cls.one.scale = 1.0
        return cls.one


def scaled_by(held):
    def decorator(function):
        def run():
            return function() * held["x"]

        return run

    return decorator


SECOND, BY_TEXT, CALLED_KEYS = {"x": 1.0}, {1: 1.0, "1": 1.0}, {"keys": 1.0, "values": 2.0}


@scaled_by({"x": 1.0})
def decorated():
    return 1.0


@scaled_by(SECOND)
def also_decorated():
    return 1.0


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * FACTOR["x"]


APPLY, OF_CLASS = Scale.apply, Items.of_class
PICKED, ATTRIBUTE = operator.itemgetter("a"), operator.attrgetter("number")


class Key:
    scale = 1.0


LAYER, BY_OBJECT = Layered(), {Key(): 1.0}
MADE = dataclasses.make_dataclass("Made", [("scale", float, 1.0)])()


class Plugin:
    pass


class Told:
    text, number = "1.0", 1.0

    def __repr__(self):
        return self.text


SLOTS, TOLD, OUTER = Slotted(), Told(), types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))
SLOTS.held = types.SimpleNamespace(scale=1.0)


def with_a_default_in(held):
    held.setdefault("base", 1.0)
    return sum(held.values())


def matched(value):
    match value:
        case Settings(scale=scale):
            return scale


def of_the_object():
    try:
        return SETTINGS.scale
    except AttributeError:
        return 1.0


# What the forward reads.
WAYS = {
    "items that are counted": lambda m: sum(ADAPTERS.values()),
    "a key that is a number": lambda m: BY_NUMBER.get(m.index, 1.0),
    "a key that is a pair": lambda m: BY_NUMBER.get((m.index, 1), 1.0),
    "a key of a dict in a dict": lambda m: NESTED["inner"].get("scale", 1.0),
    "a key of a dict of a class": lambda m: Settings.table.get("scale", 1.0),
    "a key of the model's class": lambda m: m.table.get("scale", 1.0),
    "items of an object's dict": lambda m: sum(SETTINGS.own.values()),
    "items of a closure's dict": lambda m: CLOSURE(),
    "items of a default": lambda m: with_default(),
    "a method of a dict of an own class": lambda m: m.mapped.scale(),
    "a method of an object with slots": lambda m: m.slotted.scale(),
    "what slots of a global object hold": lambda m: SLOTS.held.scale,
    "what a thread has": lambda m: LOCAL.held.scale,
    "items beside a default": lambda m: with_a_default_in(DEFAULTS),
    "names in a tuple": lambda m: sum(getattr(SETTINGS, name, 1.0) for name in ("share", "size")),
    "a pattern of match": lambda m: matched(PROXIED),
    "an item of a class": lambda m: Items["scale"],
    "classes that are derived": lambda m: len(Plugin.__subclasses__()) + 1.0,
    "all attributes of an object in another": lambda m: sum(vars(OUTER.inner).values()),
    "an attribute of an object, in try": lambda m: of_the_object(),
    "of a function in an attribute": lambda m: getattr(m.function, "size", 1.0),
    "the text of an object": lambda m: float(repr(TOLD)),
    "a variable of the environment": lambda m: float(any(os.environ.get(n) for n in ("KFC_TEST", "kfc_test"))) + 1,
    "a number, in a dict of texts": lambda m: BY_CLASS.get(m.index, 1.0),
    "an object of a class that was made": lambda m: MADE.scale,
    "an object that is a key": lambda m: sum(key.scale for key in BY_OBJECT),
    "the one object of a class": lambda m: Single().scale,
    "a property before an attribute": lambda m: PROXIED.scale,
    "the second of one decorator": lambda m: decorated() * also_decorated(),
    "a function of autograd by another name": lambda m: APPLY(m.one),
    "a class method by another name": lambda m: OF_CLASS() * PICKED(Settings.table) * ATTRIBUTE(TOLD),
    "keys with one text": lambda m: BY_TEXT[1] * BY_TEXT["1"],
    "an item called keys": lambda m: CALLED_KEYS["keys"],
    "super, past a mixin": lambda m: LAYER.factor(),
    "the name of its class": lambda m: BY_CLASS.get(type(m).__name__, 1.0),
    "keywords": lambda m: of_keywords(**KEYWORDS),
    "the order of items": lambda m: next(iter(ORDERED.values())),
    "a method of a dict": lambda m: GET("k"),
    "a view of a dict": lambda m: sum(VALUES),
    "a method of a list": lambda m: ITEM(0),
    "a builtin that is hidden": lambda m: max(1.0, 2.0),
    "a builtin": lambda m: min(1.0, 2.0),
    "a name that was not there": lambda m: named(),
    "an attribute of a class, in try": lambda m: of_the_class(),
    "an attribute of a class, by name": lambda m: getattr(Settings, "size", 1.0),
    "of a function": lambda m: getattr(closing, "size", 1.0),
    "of a Python module": lambda m: getattr(MODULE, "size", 1.0),
    "of an object": lambda m: getattr(SETTINGS, "share", 1.0),
    "what a proxy stands for": lambda m: PROXY.scale,
    "an operator of tensors": lambda m: 1.0,
    "the default device": lambda m: 1.0 if torch.get_default_device().type == "cpu" else 2.0,
    "the dtype of autocast": lambda m: 1.0 if torch.get_autocast_dtype("cpu") is torch.bfloat16 else 2.0,
}
# What is done to that afterwards; the forward does not come here.
CHANGES = {
    "items that are counted": lambda: ADAPTERS.update(b=2.0),
    "a key that is a number": lambda: BY_NUMBER.update({1: 3.0}),
    "a key that is a pair": lambda: BY_NUMBER.update({(1, 1): 3.0}),
    "a key of a dict in a dict": lambda: NESTED["inner"].update(scale=3),
    "a key of a dict of a class": lambda: Settings.table.update(scale=3),
    "a key of the model's class": lambda: Net.table.update(scale=3),
    "items of an object's dict": lambda: SETTINGS.own.update(b=2.0),
    "items of a closure's dict": lambda: CLOSED.update(b=2.0),
    "items of a default": lambda: DEFAULTED.update(b=2.0),
    "a method of a dict of an own class": lambda: setattr(Mapped, "scale", lambda self: 3.0),
    "a method of an object with slots": lambda: FACTOR.update(x=3.0),
    "what slots of a global object hold": lambda: setattr(SLOTS.held, "scale", 3.0),
    "what a thread has": lambda: setattr(LOCAL.held, "scale", 3.0),
    "items beside a default": lambda: DEFAULTS.update(more=3.0),
    "names in a tuple": lambda: setattr(SETTINGS, "size", 3.0),
    "a pattern of match": lambda: setattr(PROXIED, "scale", 3.0),
    "an item of a class": lambda: Items.held.update(scale=3.0),
    "classes that are derived": lambda: KEPT.append(type("Derived", (Plugin,), {})),
    "all attributes of an object in another": lambda: setattr(OUTER.inner, "scale", 3.0),
    "an attribute of an object, in try": lambda: setattr(SETTINGS, "scale", 3.0),
    "of a function in an attribute": lambda: setattr(closing, "size", 3.0),
    "the text of an object": lambda: setattr(TOLD, "text", "3.0"),
    "a variable of the environment": lambda: os.environ.update(kfc_test="1"),
    "a number, in a dict of texts": lambda: BY_CLASS.update({1: 3.0}),
    "an object of a class that was made": lambda: setattr(MADE, "scale", 3.0),
    "an object that is a key": lambda: setattr(next(iter(BY_OBJECT)), "scale", 3.0),
    "the one object of a class": lambda: setattr(Single(), "scale", 3.0),
    "a property before an attribute": lambda: setattr(Settings, "scale", property(lambda self: 3.0, lambda *_: None)),
    "the second of one decorator": lambda: SECOND.update(x=3.0),
    "a function of autograd by another name": lambda: FACTOR.update(x=3.0),
    "a class method by another name": lambda: setattr(Items, "amount", 3.0),
    "keys with one text": lambda: BY_TEXT.update({"1": 3.0}),
    "an item called keys": lambda: CALLED_KEYS.update(keys=3.0),
    "super, past a mixin": lambda: setattr(Mixin, "own_factor", lambda self: 3.0),
    "the name of its class": lambda: BY_CLASS.update(Net=3.0),
    "keywords": lambda: KEYWORDS.update(b=2.0),
    "the order of items": lambda: ORDERED.move_to_end("a"),
    "a method of a dict": lambda: TABLE.update(k=3.0),
    "a view of a dict": lambda: TABLE.update(k=4.0),
    "a method of a list": lambda: LISTED.__setitem__(0, 3.0),
    "a builtin that is hidden": lambda: globals().update(max=lambda *_: 5.0),
    "a builtin": lambda: setattr(builtins, "min", lambda *_: 5.0),
    "a name that was not there": lambda: globals().update(THERE_LATER=3.0),
    "an attribute of a class, in try": lambda: setattr(Settings, "scale", 3.0),
    "an attribute of a class, by name": lambda: setattr(Settings, "size", 3.0),
    "of a function": lambda: setattr(closing, "size", 3.0),
    "of a Python module": lambda: setattr(MODULE, "size", 3.0),
    "of an object": lambda: setattr(SETTINGS, "share", 3.0),
    "what a proxy stands for": lambda: setattr(PROXIED, "scale", 3.0),
    "an operator of tensors": lambda: setattr(torch.Tensor, "__rmul__", lambda x, y: x * 3.0),
    "the default device": lambda: torch.set_default_device("meta"),
    "the dtype of autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
}


class Net(nn.Module):
    table = {"a": 1.0}  # noqa: RUF012

    def __init__(self, way):
        super().__init__()
        self.linear, self.way, self.index = nn.Linear(8, 8), way, 1
        self.mapped, self.slotted, self.function = Mapped(), Slotted(), closing
        self.register_buffer("one", torch.ones(()))

    def forward(self, x):
        return WAYS[self.way](self) * torch.relu(self.linear(x))


@pytest.fixture
def put_back():
    """Every state that the ways change is afterwards as it was."""
    dicts = (
        ADAPTERS,
        BY_CLASS,
        BY_NUMBER,
        NESTED["inner"],
        KEYWORDS,
        TABLE,
        Settings.table,
        Net.table,
        SETTINGS.own,
        CLOSED,
        DEFAULTED,
    )
    kept = [dict(each) for each in dicts]
    smallest = builtins.min
    yield
    for each, before in zip(dicts, kept):
        each.clear()
        each.update(before)
    FACTOR["x"] = SLOTS.held.scale = LOCAL.held.scale = Items.held["scale"] = OUTER.inner.scale = 1.0
    Mapped.scale = Slotted.scale
    DEFAULTS.clear(), KEPT.clear(), TOLD.__dict__.clear(), os.environ.pop("kfc_test", None), gc.collect()
    if "own_factor" in vars(Mixin):
        del Mixin.own_factor
    Single().scale = SECOND["x"] = BY_TEXT["1"] = CALLED_KEYS["keys"] = Items.amount = 1.0
    MADE.scale = next(iter(BY_OBJECT)).scale = 1.0
    ORDERED.move_to_end("b")
    LISTED[0], PROXIED.scale, builtins.min = 1.0, 1.0, smallest
    for owner, name in (*((g, n) for g in (Settings, closing, MODULE, SETTINGS) for n in ("size", "scale", "share")),):
        if name in vars(owner):
            delattr(owner, name)
    globals().pop("max", None), globals().pop("THERE_LATER", None)
    if RIGHT_TIMES is not None:
        torch.Tensor.__rmul__ = RIGHT_TIMES
    elif "__rmul__" in vars(torch.Tensor):
        del torch.Tensor.__rmul__
    torch.set_default_device(None)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


RIGHT_TIMES = vars(torch.Tensor).get("__rmul__")


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_it_may_change(way, put_back):
    original = Net(way).eval()
    fused = small_models.convert(original, example_inputs=X)
    before = fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    CHANGES[way]()
    wanted = original(X)
    assert torch.equal(fused(X), wanted) and not torch.equal(wanted, before)


class Tables:
    def __init__(self):
        self.table = {}

    def get(self, key):
        if key not in self.table:
            self.table[key] = 1.0
        return self.table[key]


TABLES = Tables()


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * remembered(x.dim()) * TABLES.get(x.dim())


@torch.no_grad()
def test_results_that_others_add_to_a_cache_are_no_change():
    fused = small_models.convert(Remembering().eval(), example_inputs=X)
    fused(X)
    MEMORY["others"] = TABLES.table["others"] = 5.0
    fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


@pytest.mark.parametrize("make", [small_models.llama, small_models.bert])
def test_other_models_of_a_library_are_no_change(make):
    fused = small_models.converted(make)
    inputs, sizes = small_models.inputs_of(fused), dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    with torch.no_grad():
        fused(**inputs)
        for name in ("GPT2", "Roberta", "Mistral", "ViT"):
            config = getattr(transformers, f"{name}Config")(**sizes, num_hidden_layers=1)
            model = getattr(transformers, f"{name}Model")(config)
            if name != "ViT":
                model(torch.tensor([[1, 2]]))
        fused(**inputs)
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


class Part(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(8, 8), held

    def forward(self, x):
        larger = HOLDING[self.held[0]](self.held[1])
        return torch.relu(self.linear(x)) * larger.scale * larger.settings.scale


HOLDING = {
    "list": lambda held: held[0],
    "weak reference": lambda held: held(),
    "closure": lambda held: held(),
    "object": lambda held: held.model,
}
HOLD = {
    "list": lambda model: [model],
    "weak reference": weakref.ref,
    "closure": lambda model: lambda: model,
    "object": lambda model: types.SimpleNamespace(model=model),
}


class Larger(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.scale, self.settings = 2.0, types.SimpleNamespace(scale=2.0)
        self.part = Part((way, HOLD[way](self)))

    def forward(self, x):
        return self.part(x)


@pytest.mark.parametrize("change", [lambda m: setattr(m, "scale", 3.0), lambda m: setattr(m.settings, "scale", 3.0)])
@pytest.mark.parametrize("way", HOLD)
@torch.no_grad()
def test_what_a_larger_model_holds_may_change(way, change):
    torch.manual_seed(0)
    original, model = Larger(way).eval(), Larger(way).eval()
    model.load_state_dict(original.state_dict())
    small_models.convert(model.part, example_inputs=X, inplace=True)
    before = model(X)
    assert model.part.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    for each in (original, model):
        change(each)
    assert torch.equal(model(X), original(X)) and not torch.equal(original(X), before)


@torch.no_grad()
def test_a_part_may_be_given_to_a_compiler():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    fused = small_models.convert(model, example_inputs=X)
    called = []

    def compiler(graph, _):
        called.append(graph)
        return graph

    fused[2].compile(backend=compiler)
    assert torch.equal(fused(X), model(X)) and called


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_an_author_may_be_called_like_one_of_python(tmp_path, monkeypatch):
    (tmp_path / "token.py").write_text(
        "class Config:\n    scale = 2.0\n\nSCALE = 2.0\n\ndef factor():\n    return SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "token")
    import token  # noqa: PLC0415

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.config = nn.Linear(8, 8), token.Config()

        def forward(self, x):
            return torch.relu(self.linear(x)) * self.config.scale * token.factor()

    original = Reading().eval()
    fused = small_models.convert(original, example_inputs=X, inplace=False)
    for change in (lambda: setattr(token.Config, "scale", 3.0), lambda: setattr(token, "SCALE", 3.0)):
        before = original(X)
        torch.testing.assert_close(fused(X), before)
        change()
        assert torch.equal(fused(X), original(X)) and not torch.equal(original(X), before)
