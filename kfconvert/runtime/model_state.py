"""What a fused program relies on besides the arguments: structure, modes, attributes, code and hooks of the model."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from ..process import is_of_trace, methods_stand_over, stood_over, switched_off
from ..region import Read
from .code import CodeWalk, code_walk, held_functions
from .configuration import HELD_BY_ALL, WHOLE, configurations, names_by_class
from .contents import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    Contents,
    Found,
    OfConversion,
    attributes_of,
    first_different,
    is_of_project,
    modules_around,
    outside_modules,
    slotted,
    types_held,
)
from .fingerprint import may_fetch
from .output_recording import is_recording_hook, recorded_outputs, wanted_outputs
from .program import OF_EXPORT
from .watch import DICT, ITEMS, MISSING, ROOT, SIZE, TYPE, Entry, Watch, renewed
from .weak_module import WeakModule

# What nn.Module itself and this package keep in the instance dict of a module is watched in other ways, or not at all.
_OWN_KEYS = OF_EVERY_MODULE | OF_CONVERSION
# Attributes that matter in training only, or only for how much memory training takes, in the classes of libraries.
_TRAINING_KEYS = frozenset(("gradient_checkpointing", "_gradient_checkpointing_func", "grad_checkpointing"))
_HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(torch_module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)
# What code asks of a tensor, or of torch, in order to do something else where gradients are wanted. Traces are made
# without gradients.
_OF_GRADIENTS = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf"))
_GETTERS = (
    "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32",
    "_get_cublas_allow_tf32", "_get_mkldnn_enabled", "_get_float32_matmul_precision", "_get_flash_sdp_enabled",
    "_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_deterministic_algorithms_warn_only",
    "_is_multithreading_enabled",
)  # fmt: skip
# Switches that code can ask for.
_SWITCHES: dict[str, Callable[[], Any]] = {
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "_get_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "allow_tf32": lambda: (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "deterministic": lambda: torch.backends.cudnn.deterministic,
    "enabled": lambda: (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),
    "allow_fp16_reduced_precision_reduction": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "get_default_device": torch.get_default_device,
    "initial_seed": torch.initial_seed,
    "get_num_threads": torch.get_num_threads,
    "is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "is_autocast_cache_enabled": torch.is_autocast_cache_enabled,
    "engine": lambda: torch.backends.quantized.engine,
    "get_autocast_dtype": lambda: (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
    "get_autocast_cpu_dtype": lambda: torch.get_autocast_dtype("cpu"),
    "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype("cuda"),
    **{name: getattr(torch._C, name) for name in _GETTERS if hasattr(torch._C, name)},
}
_CONTAINERS = (list, tuple, dict, set)
_REPLACED = "a submodule or its forward was replaced after the conversion; convert it again"
_CHANGED = "was changed after the conversion; convert it again"


class ModelState:
    """Tells whether a model is still as it was when this was made, as far as its programs depend on it.

    Weights may change freely, and so may what the trace did not read (``reads``). Of what it did read, the very objects
    are watched; if an equal object takes the place of one, that is watched from then on.

    ``announced`` is set where a module with weights was written since the last look, as ``train()`` and ``eval()``
    do: its weights may have been written in ways that leave no trace in them.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Iterable[Read],
        slots: Collection[tuple[str, str]] = (),
        unread: Collection[tuple[str, str]] = (),
        looks: bool = False,
        codes: Codes | None = None,
    ):
        """``slots``: path and name of each tensor that the programs read anew in every call; ``unread``: those of them
        with which at least one program does not compute; ``looks``: whether the forward looks at elements of tensors,
        so that those of attributes may stand in a program besides; ``codes``: those of other modules, which may be the
        code of this one too."""
        self._root = WeakModule(model)
        self._class = type(model)
        reads = frozenset(reads)
        self.owners, self.owner_reasons = _watched(*_modes(model, owners=True))
        self._layout = _layout(model)
        self.children: Watch
        self._watch_children()
        self.tied = _tied_places(model)
        stores = [module._parameters for module in model.modules()]
        self.parameter_places = [(store, key) for store in stores for key, p in store.items() if p is not None]
        self.parameters = [store[key] for store, key in self.parameter_places]
        self.code = (Codes() if codes is None else codes).of(model, reads, looks)
        cached = self.code.of_cached | self.code.named_by_handlers
        reads |= {(type(module), name) for module in model.modules() for name in cached & vars(module).keys()} | cached
        reads |= _read_around(model, self.code.around)
        fixed = *_structure(model), *_modes(model, owners=False)
        if any(isinstance(read, tuple) and read[1] in WHOLE for read in reads):
            fixed = *fixed, *_sizes(model)
        self.fixed, self.fixed_reasons = _watched(*fixed, *_covered(model, reads))
        self._reads, self._slots, self._unread, self._looks = reads, slots, unread, looks
        self._watch_attributes()
        self.asks_for_gradients = next(iter(sorted(_OF_GRADIENTS & self.code.asked_for)), None)
        self._watch_hooks()
        # Programs check every tensor that they read themselves. Here one tensor is enough to tell a model that was
        # moved as a whole from a call with arguments of another kind.
        floating = [(p, p.dtype, p.device) for p in model.parameters() if p.is_floating_point()]
        self.samples = floating[:1]
        self.autocast_type = floating[0][2].type if floating else "cpu"
        self.default_dtype = torch.get_default_dtype()
        self.is_parametrized = any(map(parametrize.is_parametrized, model.modules()))
        # Whether the next look compares tensors that nobody seems to have written.
        self.closely = False
        self.begin(0)

    def begin(self, check_weights: int) -> None:
        """What was written so far, by the conversion itself, announces no change of weights. After every
        ``check_weights`` looks, 0 for never, tensors that nobody seems to have written are compared too."""
        for watch in (self.owners, self.fixed, self.attributes):  # which look up the dicts of attributes here
            watch.first_change(vars(self._root()))
        self.announced = False
        self._check_weights, self._unchecked = check_weights, 0

    def refusal(self) -> str | None:
        """None where everything is as it was, else what is not."""
        return self.change() or self.circumstance()

    def change(self) -> str | None:
        """What of the model, or of the code behind it, is not as it was; None where everything is."""
        model = self._root()
        root = vars(model)
        changed = self.owners.first_change(root)
        if self.owners.written:
            self.announced = True
        if changed is not None:
            return self.owner_reasons[changed]
        if self.replaced():
            return _REPLACED
        changed = self.fixed.first_change(root)
        while changed is not None:
            if not self._has_own_forward(changed):
                return self.fixed_reasons[changed]
            changed = self.fixed.first_change(root)
        if type(model) is not self._class:
            return "the class of the model was changed after the conversion; convert it again"
        if self.cut_off is not None:
            return f"what {self.cut_off} holds is too much, or too deep within each other, to be watched"
        closely = self._is_to_look_closely()
        different = first_different(self.compared, closely)
        if different is not None:
            return f"what {different} holds {_CHANGED}"
        for module, names in self.namespaces:
            if _own_names(root if module is ROOT else vars(module)) != names:
                return f"the names of the attributes of a module, all of which the forward reads, {_CHANGED}"
        changed = self.attributes.first_change(root)
        if changed is not None and (reason := self._changed_attribute(changed, root)):
            return reason
        reason = self.code.refusal(closely)
        if reason is not None:
            return reason
        if self.code.is_outdated and self.code.switched() is None:  # else the switches of now would be expected
            self.code = Codes().of(model, self._reads, self._looks)
        for tensor, dtype, device in self.samples:
            if tensor.dtype is not dtype or tensor.device != device:
                return f"the model was moved to {tensor.dtype} on {tensor.device}; convert it again"
        for (store, key), *others in self.tied:
            if any(other.get(name) is not store.get(key) for other, name in others):
                return f"weights that were tied ({key}) are no longer"
        if self.hooks.first_change() is not None or self.hooks.written:
            self._watch_hooks()
        return self.hooked

    def circumstance(self) -> str | None:
        """What of the process, around this call, stands against the program: a switch, hooks of all modules, or
        somebody who records; None where nothing does."""
        reason = self.code.switched()
        if reason is not None:
            return reason
        if torch.is_autocast_enabled(self.autocast_type):
            return "autocast is on"
        if torch.get_default_dtype() is not self.default_dtype:
            return f"the default dtype is {torch.get_default_dtype()}, and was {self.default_dtype}"
        if self.is_parametrized and parametrize._cache_enabled:
            return "parametrize.cached() keeps weights around it, which a fused program would compute anew"
        reason = global_hook()
        if reason is not None:
            return reason
        return self._recording() if self.recorded else None

    def _has_own_forward(self, index: int) -> bool:
        """Whether the entry of ``fixed`` at ``index`` expects no forward on an instance, and there is now that of its
        class: who wraps a forward and puts it back leaves it so. It is expected from then on."""
        module, key, expected = entry = self.fixed.entries[index]
        held = vars(module).get("forward") if key == "forward" and expected is MISSING else None
        own_function = getattr(type(module), "forward", None)
        own = getattr(held, "__self__", None) is module and getattr(held, "__func__", None) is own_function
        if own:
            self.fixed = Watch((module, key, held) if each is entry else each for each in self.fixed.entries)
        return own

    def replaced(self) -> bool:
        """Whether a submodule was replaced, added or removed."""
        model = self._root()
        if self.children.first_change(vars(model)) is not None or self.children.written:
            # Who puts modules around others, and takes them away, as adapters do, may have written their weights.
            self.announced = True
            # A dict that holds submodules was written or replaced: their order counts as well, but not which dict holds
            # them.
            if not _is_same(_layout(model), self._layout):
                self.children = Watch(self.children.entries)  # which looks again at the next call
                return True
            self._watch_children()
        return False

    def _watch_children(self) -> None:
        model = self._root()
        self.children = Watch(entry for module in model.modules() for entry in _children(module, model))
        self.children.first_change(vars(model))

    def _watch_hooks(self) -> None:
        model = self._root()
        kinds = (vars(module)[kind] for module in model.modules() for kind in _HOOK_KINDS)
        self.hooks = Watch((hooks, SIZE, len(hooks)) for hooks in kinds)
        self.hooks.first_change()
        self.hooked = inner_hook(model) or self._replaced_parameter()
        # Where no gradient is wanted these do nothing.
        self.hooked_backward = inner_hook(model, of_gradients=True)
        self.recorded = recorded_outputs(module for module in model.modules() if module is not model)

    def _recording(self) -> str | None:
        """Why an outer call that has transformers record the outputs of submodules forbids the program; else None."""
        wanted = self.recorded & wanted_outputs()
        return f"hooks record {', '.join(sorted(wanted))}, which a fused program would not call" if wanted else None

    def _replaced_parameter(self) -> str | None:
        """Why a replaced parameter forbids the program, as in a distributed run, where a hook may gather parameters for
        the time of a call; else None."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        current = [store.get(key) for store, key in self.parameter_places]
        if distributed and not all(map(operator.is_, current, self.parameters)):
            # FSDP2 gathers the new weights into the same tensors, at times at the same address, and keeps their
            # version counters: what was derived from the old weights could not be told from what is valid.
            return "its parameters were replaced after the conversion, in a distributed run (as by fully_shard)"
        return None

    def _is_to_look_closely(self) -> bool:
        self._unchecked += 1
        wanted = self.closely or self.announced or 0 < self._check_weights <= self._unchecked
        if not wanted or not may_fetch():
            return False
        self.closely, self._unchecked = False, 0
        return True

    def _watch_attributes(self) -> None:
        model = self._root()
        contents = Contents(model)
        unread = list(_unread(model, self._reads, self._unread))
        self._first_attribute = len(unread)
        attributes = _attributes(model, self._reads, self._slots, contents, self._looks)
        found = *attributes, *_settings(model, self._reads, contents)
        self.attributes, self.attribute_reasons = _watched(*unread, *found)
        self.compared = contents.compared
        self.cut_off = contents.cut_off
        by_class = names_by_class(self._reads)
        readers = [each for each in model.modules() if "__dict__" in by_class.get(type(each), ())]
        self.namespaces = [(_held(each, model), _own_names(vars(each))) for each in readers]

    def _changed_attribute(self, changed: int | None, root: dict[str, Any]) -> str | None:
        """Why the program must not run where an attribute has another value; None where it may. It may with an equal
        value, and, for a parameter or buffer with which it does not compute, with one of the same kind: these are
        watched from then on."""
        while changed is not None and changed < self._first_attribute:
            store, key, expected = entry = self.attributes.entries[changed]
            held = store.get(key)
            if not isinstance(held, Tensor) or _kind(held) != _kind(expected):
                return self.attribute_reasons[changed]
            self.attributes = Watch((store, key, held) if each is entry else each for each in self.attributes.entries)
            changed = self.attributes.first_change(root)
        if changed is None:
            return None
        self.attributes, changed = renewed(self.attributes, changed, root)
        if changed is not None:
            return self.attribute_reasons[changed]
        self._watch_attributes()  # for what equal containers hold
        return None


class Codes:
    """The code behind modules that are looked at one after the other, with nothing changed in between. Layers of one
    structure have one code, which takes most of the time that it takes to watch a module."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Code] = {}

    def of(self, model: nn.Module, reads: frozenset[Read], looks: bool) -> Code:
        others = outside_modules(model)
        classes = [type(each) for each in (*model.modules(), *others, *configurations(model))]
        classes += types_held([value for module in model.modules() for value in attributes_of(module).values()])
        functions, words = held_functions(model), frozenset(_words(model, reads))
        # What a walk meets depends on these, and on the model itself where it meets modules, which may be its own.
        key = tuple(dict.fromkeys(classes)), tuple(map(id, functions)), words, reads, looks
        known = None if others else self._known.get(key)
        if known is not None:
            return known
        walk = code_walk(classes, functions, reads, model, looks)
        walk.words.update(words)
        code = Code(walk)
        if not (others or walk.meets_modules or walk.contents.meets_modules or modules_around(model)):
            self._known[key] = code
        return code


class Code:
    """The Python code behind a model, which all copies of the model share."""

    def __init__(self, walk: CodeWalk):
        found = list(walk.entries())
        self.asked_for = frozenset(walk.asked_for)
        # What a function with a cache reads was not seen in the trace if its answer was there already.
        self.of_cached = frozenset(walk.of_cached)
        self.around = frozenset(walk.around)
        self.named_by_handlers = frozenset(walk.named_by_handlers)
        self.compared = walk.contents.compared
        self.switches = {name: asked() for name, asked in _SWITCHES.items() if name in self.asked_for}
        self.watch = Watch(entry for _, entry in found)
        self.watch.first_change()  # which looks up the dicts of attributes that the entries speak of
        self.names = [name for name, _ in found]
        # Whether a container was replaced by an equal one since, of which nothing is watched that it holds.
        self.is_outdated = False

    def switched(self) -> str | None:
        """Which switch of the process, for which the code asks, is not as it was; None where all are."""
        for name, before in self.switches.items():
            if _SWITCHES[name]() != before:
                return f"its code asks for {name}, which was {before} at the conversion"
        return None

    def refusal(self, closely: bool) -> str | None:
        """None where the code is as it was, else what is not; ``closely`` as for ``first_different``."""
        different = first_different(self.compared, closely)
        if different is not None:
            return f"what {different} holds {_CHANGED}"
        watch = self.watch
        changed = watch.first_change()
        if changed is not None and (switched_off() or torch.compiler.is_exporting() or methods_stand_over()):
            for _ in range(2):  # twice, as the trace may begin to replace things in between
                changed = Watch(map(_beside_trace, watch.entries)).first_change()
                if changed is None:
                    break
        elif changed is not None:
            self.watch, changed = renewed(watch, changed)
            before, now = ([value for _, _, value in each.entries] for each in (watch, self.watch))
            self.is_outdated |= any(a is not b and isinstance(b, _CONTAINERS) for a, b in zip(before, now))
        return None if changed is None else f"{self.names[changed]} was replaced after the conversion; convert it again"

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self


def _read_around(model: nn.Module, around: frozenset[str]) -> set[Read]:
    """What may have been read unseen by code of the Python modules ``around``, which goes around the way in which
    classes look up attributes: all attributes of instances of classes there and, for code of the user's own, of all
    such classes."""

    def is_read(kind: type) -> bool:
        if any(base.__module__ in around for base in kind.__mro__):
            return True
        return is_of_project(kind.__module__) and any(map(is_of_project, around))

    found: set[Read] = set()
    if around:
        found.update((type(module), "__dict__") for module in model.modules() if is_read(type(module)))
        for config in configurations(model):
            if is_read(type(config)):
                found |= {(type(config), "__dict__"), *vars(config)}
    return found


def _words(model: nn.Module, reads: frozenset[Read]) -> Iterator[str]:
    """The texts that were read of modules and objects, by which code may look something up."""
    by_class, of_objects = names_by_class(reads), {read for read in reads if isinstance(read, str)}
    holders: list[tuple[Any, set[str]]] = [(module, by_class.get(type(module), set())) for module in model.modules()]
    holders += [(config, of_objects) for config in configurations(model)]
    for kind in set(map(type, model.modules())):
        yield from (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}", str(kind))
    for holder, names in holders:
        yield from (value for name in names & vars(holder).keys() if type(value := vars(holder)[name]) is str)


def _beside_trace(entry: Entry) -> Entry:
    """``entry``; or, if a trace in another thread makes it fail for now, an entry that always holds."""
    holder, key, expected = entry
    if not (isinstance(holder, dict) and isinstance(key, str)):
        return entry
    found = holder.get(key)
    if found is not expected and (stood_over(found, MISSING) is expected or is_of_trace(found, expected)):
        return {}, SIZE, 0
    return entry


def _watched(*found: tuple[Entry, str]) -> tuple[Watch, list[str]]:
    return Watch(entry for entry, _ in found), [reason for _, reason in found]


def _own_names(held: dict[str, Any]) -> set[str]:
    """The names of attributes that are of the model's author."""
    return {name for name in held.keys() - _OWN_KEYS if not isinstance(held[name], OfConversion)}


def _held(module: nn.Module, root: nn.Module) -> Any:
    """The holder of the attributes of ``module`` in an entry; the model itself is not to be kept alive."""
    return ROOT if module is root else module


# Path, the module (ROOT for the model itself), and its dicts of tensors.
_Place = tuple[str, Any, dict[str, Any], dict[str, Any]]


def _layout(model: nn.Module) -> list[_Place]:
    """All modules in their order, those that stand at several places at each."""
    modules = model.named_modules(remove_duplicate=False)
    return [(path, _held(module, model), module._parameters, module._buffers) for path, module in modules]


def _is_same(layout: list[_Place], other: list[_Place]) -> bool:
    return len(layout) == len(other) and all(
        one[0] == two[0] and all(map(operator.is_, one[1:], two[1:])) for one, two in zip(layout, other)
    )


def _children(module: nn.Module, model: nn.Module) -> Iterator[Entry]:
    yield _held(module, model), "_modules", module._modules
    yield module._modules, SIZE, len(module._modules)
    yield from ((module._modules, name, child) for name, child in module._modules.items())


def _structure(model: nn.Module) -> Iterator[tuple[Entry, str]]:
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            # The program would not read a tensor that later takes the place of None.
            for key, tensor in store.items():
                if tensor is None:
                    reason = f"the parameter or buffer {key} was None at the conversion; convert it again"
                    yield (store, key, None), reason
        for kind in ("_parameters", "_buffers", *_HOOK_KINDS):
            yield (_held(module, model), kind, vars(module)[kind]), _REPLACED
        if module is not model:
            for name in ("forward", "_call_impl", "_compiled_call_impl"):
                yield (module, name, vars(module).get(name, MISSING)), _REPLACED
            yield (module, TYPE, type(module)), _REPLACED
            yield (module, DICT, None), "all attributes of a submodule were replaced at once; convert it again"


def _sizes(model: nn.Module) -> Iterator[tuple[Entry, str]]:
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            yield (store, SIZE, len(store)), "it had other parameters or buffers at the conversion; convert it again"


def _modes(model: nn.Module, owners: bool) -> Iterator[tuple[Entry, str]]:
    """The modes of the modules that hold tensors themselves (``owners``), or of all others."""
    for module in model.modules():
        if bool(module._parameters or module._buffers) is owners:
            name = "the model" if module is model else f"a {type(module).__name__} inside the model"
            yield (_held(module, model), "training", False), f"{name} is in train mode"


def _attributes(
    model: nn.Module, reads: frozenset[Read], slots: Collection[tuple[str, str]], contents: Contents, looks: bool
) -> Iterator[tuple[Entry, str]]:
    # Programs read tensors among the attributes anew in every call, but one that several modules hold at one of its
    # places only.
    holders = Counter(id(tensor) for module in model.modules() for tensor in _tensors(module))
    by_class = names_by_class(reads)
    for path, module in model.named_modules():
        names, own = by_class.get(type(module), set()), vars(module)
        named = names & HELD_BY_ALL
        names = (names | own.keys() if "__dict__" in names else names) - _unwatched(type(module)) | named
        for key in sorted(key for key in names - (_children_of(module) - own.keys()) if not key.startswith("__")):
            value = own.get(key, MISSING)
            name = f"{path}.{key}" if path else key
            if not (isinstance(value, Tensor) and holders[id(value)] == 1 and (path, key) in slots):
                yield (_held(module, model), key, value), f"the attribute {name} {_CHANGED}"
            # The code asked by hasattr() or getattr(). The dicts of the classes are searched here, as getattr would
            # call descriptors.
            if value is MISSING and not any(key in vars(kind) for kind in type(module).__mro__):
                for store in (module._parameters, module._buffers, module._modules):
                    yield (store, key, MISSING), f"{name} was not there at the conversion; convert it again"
            if isinstance(module, nn.RNNBase) and key == "_flat_weights":
                # The list holds the module's parameters again, with which the code only computes: their contents do not
                # matter.
                yield (value, ITEMS, tuple(value)), f"the attribute {name} {_CHANGED}"
            elif looks or not (isinstance(value, Tensor) and (path, key) in slots):
                yield from _reasons(contents.of(name, value))


def _unwatched(kind: type) -> frozenset[str]:
    """The names of attributes of modules of a class that are watched in other ways, or not at all."""
    return _OWN_KEYS if any(is_of_project(each.__module__) for each in kind.__mro__) else _OWN_KEYS | _TRAINING_KEYS


def _covered(model: nn.Module, reads: frozenset[Read]) -> Iterator[tuple[Entry, str]]:
    """That no attribute is put in the place of a parameter, buffer or submodule that the code reads: Python would find
    it before these."""
    by_class = names_by_class(reads)
    for path, module in model.named_modules():
        names = by_class.get(type(module), set())
        names = _children_of(module) if "__dict__" in names else names & _children_of(module)
        for key in sorted(names - vars(module).keys()):
            name = f"{path}.{key}" if path else key
            reason = f"an attribute was put in the place of {name} (as by weight_norm or pruning); convert it again"
            yield (_held(module, model), key, MISSING), reason


def _children_of(module: nn.Module) -> set[str]:
    return module._modules.keys() | module._parameters.keys() | module._buffers.keys()


def _unread(
    model: nn.Module, reads: frozenset[Read], slots: Collection[tuple[str, str]]
) -> Iterator[tuple[Entry, str]]:
    """The parameters and buffers of which the code asks something, such as the shape, without computing with them."""
    by_class = names_by_class(reads)
    for path, key in sorted(slots):
        module = model.get_submodule(path)
        store = next((each for each in (module._parameters, module._buffers) if each.get(key) is not None), None)
        if store is not None and key in by_class.get(type(module), ()):
            name = f"{path}.{key}" if path else key
            yield (store, key, store[key]), f"{name}, of which the forward asks more than its elements, {_CHANGED}"


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What code can ask of a tensor besides its elements. Those that torch.export has in the places of others count as
    what they stand for."""
    kind: type = type(tensor)
    if kind in OF_EXPORT:
        kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    return kind, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _reasons(found: Iterable[Found]) -> Iterator[tuple[Entry, str]]:
    for name, entry in found:
        yield entry, f"what {name} holds {_CHANGED}"


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for store in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in store.values() if isinstance(value, Tensor))


def _settings(model: nn.Module, reads: frozenset[Read], contents: Contents) -> Iterator[tuple[Entry, str]]:
    names = sorted(name for name in reads if isinstance(name, str) and name != "__dict__")
    by_class = names_by_class(reads)
    for config in configurations(model):
        yield (config, TYPE, type(config)), f"the class of an object of the model {_CHANGED}"
        yield (config, DICT, None), f"what an object of the model holds {_CHANGED}"
        for name in names:
            value = vars(config).get(name, MISSING)
            yield (config, name, value), f"{name} in the configuration of the model {_CHANGED}"
            yield from _reasons(contents.of(f"{name} in the configuration of the model", value))
        if "__dict__" in reads or "__dict__" in by_class.get(type(config), ()):
            yield (config, SIZE, len(vars(config))), f"what the configuration of the model holds {_CHANGED}"
        if slotted(config):
            yield from _reasons(contents.of("the configuration of the model", config))


def _tied_places(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """The groups of places that hold one and the same tensor; a region reads each group at one place only."""
    groups: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    groups.setdefault(id(tensor), []).append((store, key))
    return [places for places in groups.values() if len(places) > 1]


def inner_hook(model: nn.Module, of_gradients: bool = False) -> str | None:
    """Why a program of ``model`` would leave out hooks of its submodules, those around their forwards or those ``of
    gradients``; None where there are none."""
    for name, module in model.named_modules():
        if module is not model and (_has_backward_hooks if of_gradients else has_hooks)(module):
            return f"{name} has hooks, which a fused program would not call"
    return None


def global_hook() -> str | None:
    """Why a program would leave out hooks of all modules of the process; None where there are none."""
    return "hooks of all modules are registered, which a fused program would not call" if any(_GLOBAL_HOOKS) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has hooks that its ``__call__`` runs around its forward."""
    kinds = (module._forward_hooks, module._forward_pre_hooks)
    # Those that transformers leaves in place are asked for by themselves, see recorded_outputs.
    return any(not is_recording_hook(hook) for kind in kinds for hook in kind.values())


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
