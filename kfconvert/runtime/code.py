"""The Python code that a forward runs through: methods of classes, and what functions read from their modules.

Libraries patch both in a process that holds a converted model: a class's ``forward``, or a function such as
``apply_rotary_pos_emb`` in the globals of the model's source file.
"""

from __future__ import annotations

import builtins
import functools
import gc
import inspect
import operator
import os
import re
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..region import Read
from .configuration import names_by_class
from .container_uses import container_uses
from .contents import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    Contents,
    Found,
    is_class_of_author,
    is_of_author,
    is_of_project,
    is_own_object,
    is_plain_object,
    is_weak,
    items,
    opened,
    referent,
    slotted,
)
from .holdings import Holdings
from .names_in_code import LONGEST, names_in, texts_in
from .watch import DICT, INSIDE, ITEMS, MISSING, TYPE, Mark, inside

# nn.Module itself looks these names up in the class of every module.
# Entries of classes and modules that no forward reads; the last is put there by the first copy of an instance.
_NOTHING_READS = frozenset(("__dict__", "__weakref__", "__doc__", "__builtins__", "__slotnames__"))
_ALWAYS = frozenset(("forward", "__call__", "_call_impl", "_wrapped_call_impl"))
# Of the environment. ``_`` alone, as code calls what it does not need, is the command that a shell has begun.
_VARIABLE = re.compile(r"_*[A-Z][A-Z0-9_]*")
# So many steps, from a value to what it holds or wraps, are followed.
_DEPTH = 12
# Ways from an instance to a class, of which methods can be read that nobody reads of the instance.
_CLASSES = frozenset(("super", "type", "__class__", "__mro__"))
_OPERATORS = frozenset(name for name in vars(torch._C.TensorBase) if name.startswith("__")) - {"__new__", "__init__"}
# Libraries whose code may ask whether it is being compiled, but gives the same results either way.
_SAME_COMPILED = frozenset(("transformers", "timm", "torchvision", "diffusers", "accelerate", "peft"))
# Of PyTorch itself, nn.TransformerEncoder puts zeros where a mask pads at the right, but where it is compiled.
_OTHER_COMPILED = frozenset(("torch.nn.modules.transformer",))
# By these code finds that it is compiled without a call.
OF_COMPILERS = frozenset(("_is_compiling_flag", "FakeTensor"))
# By these code reads attributes of an object, whatever its class does where one is looked up.
_AROUND = frozenset(("__getattribute__", "getattr_static"))
_HANDLERS = frozenset(("__getattribute__", "__setattr__", "__delattr__"))
# There transformers keeps what hooks may record of each class of models that an object was made of, with classes of
# submodules. Hooks are watched as such, and the other models of a process are no matter of this one.
_OF_RECORDERS = "_CAN_RECORD_REGISTRY"
_OF_NEW_OBJECTS = frozenset(("__init__", "__new__", "__post_init__"))
# Special methods that no code of a forward calls of an object that it finds.
_NEVER_CALLED = {
    *_OF_NEW_OBJECTS, "__init_subclass__", "__del__", "__repr__",
    "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__subclasshook__",
    "__set_name__",
}  # fmt: skip


def code_walk(
    classes: Iterable[type],
    functions: Iterable[Any],
    reads: Collection[Read] | None,
    held: Holdings | None = None,
    looks: bool = False,
) -> CodeWalk:
    """The code that instances of ``classes`` run, found from ``forward`` on, and that of ``functions``.

    Args:
        reads: what a trace has read of instances, None where there was no trace. Methods and properties among it are
            followed, and of modules no others but special methods and what is read of a class.
        held: what the model holds whose code this is, if other modules that the code reaches are to be followed too.
        looks: whether the code looks at elements of tensors, so that those of globals matter.
    """
    walk = CodeWalk(None if held is None else held.model, looks)
    of_class, of_objects = names_by_class(reads or ()), {read for read in reads or () if isinstance(read, str)}
    traced = set[type]()
    if held is not None and reads is not None:  # modules outside of the tree are not recorded
        traced = set(map(type, held.model.modules())) - set(map(type, held.outside))
    for each in dict.fromkeys(classes):
        names = of_class.get(each, set()) if issubclass(each, nn.Module) else of_objects | _of_any_read(each)
        walk.add_class(each, names | _ALWAYS, each in traced and "__dict__" not in names)
    for function in functions:
        walk.follow(function, getattr(function, "__qualname__", "a function"))
    return walk


def whole_walk(model: nn.Module) -> CodeWalk:
    """All code that modules and configurations of ``model`` can run, and what they hold that can be called, whatever a
    trace has read."""
    held = Holdings(model)
    walk = code_walk([type(each) for each in (*model.modules(), *held.configurations)], held.functions, None)
    walk.reach()
    return walk


def is_same_compiled(module: str | None) -> bool:
    """Whether code of the Python module of this name gives the same results where it is told that it is compiled."""
    if module in _OTHER_COMPILED:
        return False
    return not is_of_author(module) or (module or "").partition(".")[0] in _SAME_COMPILED


def class_dict(owner: type) -> dict[str, Any]:
    """The dict behind the read-only ``owner.__dict__``; it has a version, which the other one hides."""
    return gc.get_referents(owner.__dict__)[0]


class CodeWalk:
    """Functions that are reached one from another, by the names in their code, in the same order in every process:
    what is reached in several ways goes by the name of the first.

    ``contents`` collects what global lists and dicts hold, ``asked_for`` the names of attributes and globals in code
    that is not torch's, and those of the functions of torch that it holds under other names.
    """

    def __init__(self, model: nn.Module | None = None, looks: bool = False):
        self._model, self._looks = model, looks
        self._known = set() if model is None else set(map(id, model.modules()))  # modules that are watched elsewhere
        self.contents = Contents(model)
        self.meets_modules = False  # whether there is a module among what was reached
        self.asked_for: set[str] = set()
        self.cached: dict[int, functools._lru_cache_wrapper[Any]] = {}  # functions with a cache
        self.of_cached: set[str] = set()  # attributes that functions with a cache read, when they run at all
        self.around = set[str]()  # Python modules with code that reads attributes around the way of a class
        self.named_by_handlers = set[str]()  # in the code by which classes have their attributes read
        self.of_compilers: set[str] = set()  # asked for by code that may do something else while it is compiled
        self._names: set[str] = set(_ALWAYS)  # of attributes, in all code that was reached
        self._wanted: dict[type, set[str]] = {}  # the names that are asked for in a class and those behind it
        self._untraced: set[type] = set()  # among these, such of whose instances not every read was recorded
        self._of_classes: set[str] = set()  # attributes in code that may read them of a class
        # Plain objects, with their names. Of those that stand in the globals, in closures and the like all attributes
        # count, of those within others and in containers such as the code names.
        self._objects: dict[int, tuple[str, Any]] = {}
        self._inner: dict[int, tuple[str, Any]] = {}
        self._of_author = True  # whether an author's code is followed now
        self._of_project = True  # whether that is of the user's own project
        # Texts by which code may look something up in dicts, added by the owner, and constants in the code.
        self.words: set[str] = set()
        self._constants: set[str] = set()
        self._asks_environment = False
        self._environment: set[str] = set()  # texts in code that asks it
        self._asked_by_name: set[str] = set()  # attributes in texts, which need not be there
        self._reads_dicts = False  # whether the code reads all attributes of something
        self._held: dict[int, Any] = {}  # containers
        self._dicts: list[tuple[str, dict[Any, Any], bool]] = []  # among these; whether a project's code reads it
        # Names of containers that the code writes to, and that it uses as a whole, see ``container_uses``; and the
        # texts in code that looks items up, by the name of the container.
        self._written: set[str] = set()
        self._whole: set[str] = set()
        self._keys: dict[str, set[str]] = {}
        self._followed: set[tuple[int, str]] = set()  # attributes of objects
        self._modules: dict[int, types.ModuleType] = {}  # that something holds
        self._python_modules: dict[int, types.ModuleType] = {}  # of which attributes are read
        self._functions: dict[int, types.FunctionType] = {}  # several of which may share their code
        self._found: dict[tuple[int, Any], Found] = {}

    def add_class(self, owner: type, names: set[str], traced: bool = False) -> None:
        """Follow the methods called ``names`` of a class, wherever among its bases they are defined; ``traced``: what
        was read of its instances is among the names."""
        for base in owner.__mro__:
            if base is object:
                continue
            self._wanted.setdefault(base, set()).update(names)
            if not traced:
                self._untraced.add(base)

    def reach(self) -> None:
        """Follow all names, until no new function is found any more."""
        known = -1
        while known != (found := sum(len(each) for each in self._reached())):
            known = found
            for name, value in [*self._objects.values(), *self._inner.values()]:
                self._attributes(name, value, self._names & vars(value).keys())
            for owner, names in list(self._wanted.items()):
                self._methods(owner, names)
            self._of_author = True
            for module in list(self._modules.values()):
                self._module(module, frozenset(self._names), set())

    def _reached(self) -> Iterable[Collection[Any]]:
        classes = self._wanted, self._untraced, self._of_classes
        return self._functions, *classes, self._modules, self._objects, self._inner

    def texts_among(self, names: Collection[str]) -> frozenset[str]:
        """Those of ``names`` that the code holds as texts, by which it may look something up in a ``__dict__``."""
        return frozenset(self._constants.intersection(names))

    def codes(self) -> list[types.CodeType]:
        """That of all functions that were reached, and of the functions within them."""
        pending = list({id(each.__code__): each.__code__ for each in self._functions.values()}.values())
        found = []
        while pending:
            found.append(pending.pop())
            pending += [each for each in found[-1].co_consts if isinstance(each, types.CodeType)]
        return found

    def entries(self) -> Iterator[Found]:
        """All entries, once no new function is reached any more."""
        self.reach()
        for owner in self._wanted:
            # A method that is put there later comes before that of a base.
            behind = set[str]()
            for kind in reversed(owner.__mro__[:-1]):
                for name in behind - vars(kind).keys():
                    if self._is_wanted(kind, name):
                        self._note(class_dict(kind), name, f"{kind.__qualname__}.{name}")
                behind |= self._names & vars(kind).keys()
        for owner, names in self._wanted.items():
            held = class_dict(owner)
            # What Python itself looks up in the class of a module is not among what was read of the module.
            special = _special(owner) if issubclass(owner, nn.Module) else frozenset()
            asked = self._asked_by_name if owner in self._untraced else frozenset()
            for name in names | special | asked | (self._names & held.keys()):
                self._note(held, name, f"{owner.__qualname__}.{name}")
        for name, value in [*self._objects.values(), *self._inner.values()]:
            self._nearer(name, value)
            if self._reads_dicts:
                self._note_names(name, value)
        if "__subclasses__" in self._names:
            for owner in (each for each in self._wanted if is_of_author(each.__module__)):
                self.contents.subclasses_of(f"{owner.__qualname__}.__subclasses__()", owner)
        self._note_added_keys()
        self._note_missing_keys()
        for module in self._python_modules.values():
            for name in self._asked_by_name - vars(module).keys():
                self._note(vars(module), name, f"{module.__name__}.{name}")
        methods = class_dict(Tensor)
        # A method that is put there later comes before that of the base; operators are not named in code.
        for name in self._names | _OPERATORS:
            if hasattr(Tensor, name):
                self._note(methods, name, f"Tensor.{name}")
        yield from self._found.values()

    def _note_added_keys(self) -> None:
        """Note the keys of dicts to which this code adds none, as it does results by their arguments: others do that,
        to have it do something else. Where single items are looked up by texts or classes, libraries add more to their
        registries."""
        for name, container, of_project in self._dicts:
            known_as = name.rpartition(".")[2]
            by_name = not of_project and known_as in self._keys and known_as not in self._whole
            if by_name and container and all(isinstance(key, (str, type)) for key in dict.keys(container)):
                for key in self._keys[known_as] - dict.keys(container):
                    self._note(container, key, f"{key} in {name}")
            elif known_as not in self._written:
                for path, entry in self.contents.keys_of(f"the keys of {name}", container):
                    self._found[id(container), ITEMS] = path, entry

    def _note_missing_keys(self) -> None:
        """Note what code may ask dicts and the environment for that is not there, or may be another."""
        for container in list(self._held.values()):
            if isinstance(container, dict):
                for key in self.words - dict.keys(container):
                    self._note(container, key, f"{key} in a dict")
        if self._asks_environment:
            environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]  # not public
            named = {value for _, (_, _, value) in self._found.values() if type(value) is str}
            for word in self._constants | self.words | named:
                if _VARIABLE.fullmatch(word) or word in self._environment:
                    self._note(environment, os.environ.encodekey(word), f"{word} in the environment")

    def _nearer(self, name: str, value: Any) -> None:
        """Note the places where something that is put there later would come before what an object's classes have by a
        name, or would be there at all, where the code may ask whether it is."""
        stores = [vars(value), *map(class_dict, type(value).__mro__[:-1])]
        for asked in self._names:
            nowhere = len(stores) if asked in self._asked_by_name else 0
            found = next((index for index, store in enumerate(stores) if asked in store), nowhere)
            # A property of a class comes before an attribute of the object.
            before = stores[1:] if found == 0 and asked in stores[0] and is_own_object(value) else stores[:found]
            for store in before:
                self._note(store, asked, f"{name}.{asked}")

    def _is_wanted(self, owner: type, name: str) -> bool:
        """Whether code may look up a name, one that it reads of something, in this class."""
        if name in _OF_NEW_OBJECTS and name not in self._names and not is_of_project(owner.__module__):
            return False  # Of most classes that code names it makes no object, and what they start with is much.
        return (
            owner in self._untraced or name in self._wanted[owner] or name in self._of_classes or name.startswith("__")
        )

    def _methods(self, owner: type, names: set[str]) -> None:
        if not _is_followed(owner.__module__):
            return
        held = class_dict(owner)
        self._of_author, self._of_project = is_of_author(owner.__module__), is_of_project(owner.__module__)
        for name in sorted((names | self._names) & held.keys()):
            if self._is_wanted(owner, name):
                if isinstance(held[name], classmethod) and isinstance(held[name].__func__, types.FunctionType):
                    self._of_classes |= names_in(held[name].__func__.__code__).attributes
                self.follow(held[name], f"{owner.__qualname__}.{name}")

    def follow(self, value: Any, name: str, depth: int = 0, inner: bool = False) -> None:
        """Reach the functions in ``value``: a function, method, property, partial or decorated function, a class, or
        an object that holds such; ``inner``: one that another object or a container holds."""
        if depth > _DEPTH:
            return
        if is_weak(value):
            self.follow(referent(value), name, depth + 1)
        elif isinstance(value, types.FunctionType):
            if self._of_author and not is_of_author(value.__module__):
                self.asked_for.add(value.__name__)
            before = self._of_author, self._of_project
            self._of_author, self._of_project = is_of_author(value.__module__), is_of_project(value.__module__)
            self._function(value, depth)
            self._of_author, self._of_project = before
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            self.follow(value.__func__, name, depth + 1)
            owner = getattr(value, "__self__", None)
            if isinstance(owner, (nn.Module, type)) or is_plain_object(owner):
                self.follow(owner, name, depth + 1)
        elif isinstance(value, property):
            self.follow(value.fget, name, depth + 1)
        elif isinstance(value, functools.cached_property):
            self.follow(value.func, name, depth + 1)
        elif isinstance(value, functools.singledispatchmethod):
            self.follow(value.dispatcher, name, depth + 1)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._hold(name, value.keywords, depth)
            for bound in (value.func, *value.args):
                self.follow(bound, name, depth + 1)
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            self._names |= {word for text in texts_in(value.__reduce__()[1]) for word in text.split(".")}
        elif isinstance(value, functools._lru_cache_wrapper):
            self.follow(value.__wrapped__, name, depth + 1)
            self._cached(value, name, depth)
            if isinstance(code := getattr(value.__wrapped__, "__code__", None), types.CodeType):
                self.of_cached |= names_in(code).attributes
        elif inspect.isbuiltin(value):
            if self._of_author:
                self.asked_for.add(value.__name__)
            if opened(value) is not value:
                self._hold(name, value, depth)
            elif isinstance(value.__self__, type):  # as ``apply`` of a torch.autograd.Function
                self.follow(value.__self__, name, depth + 1)
        elif hasattr(type(value), "__wrapped__"):
            return
        elif isinstance(value, type):
            if is_class_of_author(value) and value not in self._untraced:
                self.add_class(value, set() if issubclass(value, nn.Module) else _special(value) | _OF_NEW_OBJECTS)
                if is_of_project(type(value).__module__):  # its metaclass
                    self.add_class(type(value), _special(type(value)))
        elif isinstance(value, types.ModuleType):
            if is_of_author(value.__name__):
                self._modules[id(value)] = value
        elif isinstance(value, nn.Module):
            self._outside(name, value, depth)
        elif is_plain_object(value):
            self._object(name, value, depth, inner)
        elif isinstance(value, Tensor):
            if self._looks:
                self.contents.numbers_of(name, value)
        else:
            self._hold(name, value, depth)

    def _object(self, name: str, value: Any, depth: int, inner: bool) -> None:
        own = is_own_object(value)
        inner = inner and not own
        if id(value) in self._objects or (inner and id(value) in self._inner):
            return
        (self._inner if inner else self._objects)[id(value)] = name, value
        self._found[id(value), TYPE] = (f"the class of {name}", (value, TYPE, type(value)))
        self._found[id(value), DICT] = (f"the attributes of {name}", (value, DICT, None))
        if not inner:
            for key, item in list(vars(value).items()):
                self._note(vars(value), key, f"{name}.{key}")
                if isinstance(item, (list, tuple, dict, set)):
                    self._hold(f"{name}.{key}", item, depth)
                elif own and (is_plain_object(item) or slotted(item)):
                    self.follow(item, f"{name}.{key}", depth + 1, inner=True)
            if own:
                self._note_names(name, value)
        if type(value) not in self._wanted:
            self.add_class(type(value), _special(type(value)))
        if slotted(value):
            self._hold(name, value, depth)

    def _attributes(self, name: str, value: Any, keys: set[str]) -> None:
        for key in sorted(keys):
            self._note(vars(value), key, f"{name}.{key}")
            held = id(value), key
            if held not in self._followed:
                self._followed.add(held)
                self.follow(vars(value)[key], f"{name}.{key}", 1, inner=True)

    def _cached(self, function: functools._lru_cache_wrapper, name: str, depth: int) -> None:
        """What a function with a cache has answered so far; where it takes no arguments, the cache must go on having
        that very answer."""
        self.cached[id(function)] = function
        for held in gc.get_referents(function):
            if held is vars(function) or held is function.__wrapped__ or isinstance(held, type):
                continue
            if type(held) is not dict:  # arguments or an answer, in a cache of limited size
                self.follow(held, name, depth + 1, inner=True)
                continue
            if () in held:
                self._note(held, (), f"the answer of {name}")
            for answer in held.values():
                self.follow(answer, name, depth + 1, inner=True)

    def _outside(self, name: str, module: nn.Module, depth: int) -> None:
        """A module that is not registered in the model, nor the model in it, but which its code reaches."""
        self.meets_modules = True
        if self._model is None or id(module) in self._known:
            return
        for path, entry in self.contents.of(name, module):
            self._found.setdefault(_place(*entry[:2]), (path, entry))
        for inner in module.modules():
            if id(inner) not in self._known:
                self._known.add(id(inner))
                self.add_class(type(inner), set(_ALWAYS))
                for key in sorted(vars(inner).keys() - OF_EVERY_MODULE - OF_CONVERSION):
                    self.follow(vars(inner)[key], f"{name}.{key}", depth + 1)

    def _hold(self, name: str, container: Any, depth: int) -> None:
        if id(container) in self._held:
            return
        self._held[id(container)] = container
        # Whether an item that is added to a dict is a change is known when all of the code is.
        for path, entry in self.contents.of(name, container, sized=False):
            self._found.setdefault(_place(*entry[:2]), (path, entry))
        if isinstance(opened(container), dict):
            self._dicts.append((name, opened(container), self._of_project))
        kind = type(container)
        if is_of_author(kind.__module__) and kind not in self._wanted:
            self.add_class(kind, _special(kind))
        for item in items(container) or slotted(container).values():
            self.follow(item, name, depth + 1, inner=True)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if id(function) in self._functions or not _is_followed(function.__module__):
            return
        self._functions[id(function)] = function
        self._found[id(function), INSIDE] = (function.__qualname__, (function, INSIDE, inside(function)))
        if function.__kwdefaults__:
            self._hold(function.__qualname__, function.__kwdefaults__, depth)
        registry = getattr(function, "registry", None)
        if isinstance(registry, types.MappingProxyType):  # of functools.singledispatch; its closure has a cache besides
            self._hold(function.__qualname__, registry, depth)
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if variable != "__class__":  # for super()
                self.follow(held, f"{function.__qualname__}.{variable}", depth + 1)
        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        for argument, default in zip(arguments[len(arguments) - len(defaults) :], defaults):
            self.follow(default, f"{function.__qualname__}.{argument}", depth + 1)
        if is_of_project(function.__module__):
            self._note_names(function.__qualname__, function)
            self._found[id(function), DICT] = (function.__qualname__, (function, DICT, None))
        for key in sorted(vars(function).keys() - {"__wrapped__"}):
            self._note(vars(function), key, f"{function.__qualname__}.{key}")
            self.follow(vars(function)[key], f"{function.__qualname__}.{key}", depth + 1)
        looked_up, attributes, constants, by_name, of_globals = names_in(function.__code__)
        self._names |= attributes
        written, looked_up_in, whole = container_uses(function.__code__)
        self._written |= written
        self._whole |= whole
        for each in looked_up_in:
            self._keys.setdefault(each, set()).update(constants)
        self._asked_by_name |= by_name
        if _CLASSES & (looked_up | attributes | set(function.__code__.co_freevars)):
            self._of_classes |= attributes
        if is_of_author(function.__module__):
            if _AROUND & (attributes | looked_up):
                # In handlers a class reads what is recorded under the name that was asked for, and what it names there.
                if function.__name__ not in _HANDLERS:
                    self.around.add(function.__module__)
                elif is_of_project(function.__module__):
                    self.named_by_handlers |= constants
            self.asked_for |= attributes | looked_up
            self._reads_dicts |= "__dict__" in attributes or "vars" in looked_up
            if not is_same_compiled(function.__module__):
                self.of_compilers |= OF_COMPILERS & (attributes | looked_up)
        for name in looked_up - function.__globals__.keys():  # of Python's, until the module has its own
            self._note(function.__globals__, name, f"{function.__module__}.{name}")
            self._note(vars(builtins), name, f"builtins.{name}")
        for name in sorted(looked_up & function.__globals__.keys()):
            value = function.__globals__[name]
            self._global(function.__globals__, name, attributes, function.__module__)
            for attribute in by_name | {attribute for owner, attribute in of_globals if owner == name}:
                self._note_absent(value, attribute, f"{function.__module__}.{name}.{attribute}")
        self._constants |= constants
        if {"environ", "getenv"} & (looked_up | attributes):
            self._asks_environment = True
            self._environment |= {each for each in constants if len(each) <= LONGEST}

    def _note_absent(self, value: Any, attribute: str, name: str) -> None:
        """Note that a class, a function or a Python module does not have an attribute for which the code asks."""
        if isinstance(value, type):
            stores = [class_dict(kind) for kind in value.__mro__[:-1] if is_of_author(kind.__module__)]
        elif isinstance(value, types.FunctionType):
            stores = [vars(value)] if is_of_author(value.__module__) else []
        else:
            stores = [vars(value)] if isinstance(value, types.ModuleType) and is_of_author(value.__name__) else []
        if not any(attribute in store for store in stores):
            for store in stores:
                self._note(store, attribute, name)

    def _global(self, store: dict[str, Any], name: str, names: frozenset[str], module: str) -> None:
        value = store[name]
        if name == _OF_RECORDERS and module.partition(".")[0] == "transformers":
            return
        if isinstance(value, types.ModuleType):
            root = value.__name__.partition(".")[0]
            if root == "torch" or is_of_author(root):
                self._note(store, name, f"{module}.{name}")
                self._module(value, names, {id(value)})
            return
        self._note(store, name, f"{module}.{name}")
        self.follow(value, f"{module}.{name}")

    def _module(self, module: types.ModuleType, names: frozenset[str], seen: set[int]) -> None:
        """The attributes called ``names`` of a Python module, and of modules among them."""
        held = vars(module)
        if is_of_author(module.__name__):
            self._python_modules[id(module)] = module
        for name in sorted(names & held.keys()):
            value = held[name]
            self._note(held, name, f"{module.__name__}.{name}")
            if isinstance(value, types.ModuleType):
                within = value.__name__.startswith(f"{module.__name__}.") or is_of_author(value.__name__)
                if id(value) not in seen and within:
                    self._module(value, names, seen | {id(value)})
            else:
                self.follow(value, f"{module.__name__}.{name}")

    def _note_names(self, name: str, value: Any) -> None:
        """Note which attributes an object or function has, in their order."""
        self._found[id(value), ITEMS] = (f"the attributes of {name}", (vars(value), ITEMS, tuple(vars(value))))

    def _note(self, store: dict[Any, Any], key: Any, name: str) -> None:
        if key not in _NOTHING_READS:
            self._found.setdefault(_place(store, key), (name, (store, key, dict.get(store, key, MISSING))))


def _is_followed(module: str | None) -> bool:
    """Whether functions of the Python module of this name are followed: those of a model's author, and the forwards of
    torch's own modules, which also look up by name what they call."""
    return is_of_author(module) or (
        (module or "").startswith(("torch.nn.modules.", "torch.nn.functional")) and module != nn.Module.__module__
    )


def _special(owner: type) -> set[str]:
    """The names of the special methods of a class, which code calls without naming them."""
    never = _NEVER_CALLED - {"__repr__"} if is_of_project(owner.__module__) else _NEVER_CALLED
    return {key for kind in owner.__mro__ for key in vars(kind) if key.startswith("__")} - never - _NOTHING_READS


def _of_any_read(owner: type) -> set[str]:
    """The names of the special methods of a class of objects, by which code reads them whatever it names; of a
    library's class those by which attributes are looked up."""
    found = _special(owner)
    return found if is_of_project(owner.__module__) else found & {"__getattr__", "__getattribute__"}


def _place(store: Any, key: Any) -> tuple[int, Any]:
    """Of an entry, to know it again: equal keys may be of several kinds, and some cannot be compared."""
    return id(store), key if isinstance(key, (str, Mark)) or key == () else (type(key), id(key))
