"""The base of fused modules: activation, strategy, and checks of wrapped modules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..ops.activations import ACTIVATIONS
from ..ops.arguments import checked
from ..ops.registration import has_kernels
from ..runtime import HOOK_KINDS, ROOT, Derived, Entry, Watch
from ..torch_state import transformed

# A plan returns the module's result: a tensor, or a tuple of tensors.
Plan = Callable[..., Any]
# The channels-last memory format, by number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Attributes that plans do not store: forwards read them in each call.
_UNPREPARED = frozenset(("training", "strategy"))
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_Module = TypeVar("_Module", bound="FusedModule")


class FusedModule(nn.Module):
    """Base of the fused modules.

    ``strategy``: the implementation for inference, one of :meth:`strategies`, or None for the first of them. It
    is kept by pickling and copying. If it does not apply to the inputs, the first applicable strategy is used, among
    ``live_strategies`` if it is one of them.
    """

    # Strategies with plans that read the parameters in each call and never become stale.
    live_strategies: tuple[str, ...] = ("kernel", "composition")
    # Whether results may have other strides than the replaced operators, if those return contiguous tensors.
    lays_out_anew: bool = False
    # Whether results have the strides of the replaced operators, if those return non-contiguous tensors.
    keeps_order: bool = False
    # Indices of inputs that are static caches. The module returns changed copies, or writes in place if ``in_place``.
    caches: tuple[int, ...] = ()
    # Whether steps of generation have a strategy apart from the prompt's: for modules that keep no copies of weights.
    is_chosen_for_steps: bool = False
    # Whether the times of its strategies are valid in other processes.
    is_remembered: bool = True
    # The result in plain ATen calls, and by kernels that may need plain inputs.
    reference: Callable[..., Any]
    _kernel: Callable[..., Any]

    @checked
    def __init__(self, activation: str = "none", negative_slope: float = 0.01):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.negative_slope = negative_slope
        self.strategy: str | None = None
        self._derived = Derived()

    def __init_subclass__(cls, **attributes):
        """Sets the keywords of a class definition, such as ``default_activation="relu"``, as attributes."""
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)

    def __setattr__(self, name, value):
        # nn.Module rejects a plain tensor in place of a Parameter, but a runtime that merges weights assigns one.
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            if self.__dict__.get("_parameters", {}).pop(name, None) is not None:
                self.register_buffer(name, value)
                return
        super().__setattr__(name, value)

    @classmethod
    def examples(cls) -> Iterator[tuple["FusedModule", tuple[torch.Tensor, ...]]]:
        """Yields small modules with inputs, for the tests of all fused modules."""
        raise NotImplementedError(f"{cls.__name__} has no example")

    def _set_tensors(self, **tensors: torch.Tensor | None) -> None:
        """Registers parameters as parameters, and other tensors as buffers."""
        for name, tensor in tensors.items():
            if tensor is None or isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def strategies(self, *inputs) -> list[str]:
        """Returns the strategies for these inputs, best guess first. The last is "composition" (plain ATen)."""
        return ["kernel", "composition"] if has_kernels(inputs[0]) else ["composition"]

    def choose(self, *inputs) -> str:
        """Returns the strategy of :meth:`forward` for these inputs without gradients."""
        applicable = self.strategies(*inputs)
        if self.strategy in applicable:
            return self.strategy
        # Programs do not watch the weights of a module with a live strategy, see places().
        is_live = self.strategy in self.live_strategies
        return next(name for name in applicable if not is_live or name in self.live_strategies)

    def forward(self, *inputs: Any) -> Any:
        """Computes the module's result. See the class for shapes."""
        sources = self.sources()
        if takes_plain_path(inputs[0], [*sources, *inputs[1:]]):
            return self.differentiable(*inputs)
        return self._planned(sources, *inputs)(*inputs)

    def differentiable(self, *inputs: Any) -> Any:
        """Computes the result with operators that have gradients; by default with the reference."""
        return self.reference(*inputs)

    def plan(self, *inputs: Any) -> Plan:
        """Prepares the inference call for inputs like these: chooses the strategy, and folds or packs weights.

        The plan records no gradients, checks nothing, and is valid until a tensor at one of :meth:`places` changes.
        """
        return self.reference if self.choose(*inputs) == "composition" else self._kernel

    def sources(self) -> list[torch.Tensor]:
        """Returns all parameters and buffers that results depend on."""
        tensors = [store[key] for store, key in self.held_places()]
        return [tensor for tensor in tensors if tensor is not None]

    def merged_weights(self) -> list[torch.Tensor]:
        """Returns the weights that a plan reads as one tensor. No copy is needed if they are contiguous in memory in
        this order. Empty by default."""
        return []

    def few_rows(self) -> Any:
        """Returns the product of a few rows of x and weights by one kernel, a ``FewRows``; None if there is none."""
        return None

    def _planned(self, sources: Sequence[torch.Tensor], *inputs: Any) -> Plan:
        """Returns the cached :meth:`plan`, or a new one if :meth:`_variant` or one of ``sources`` has changed."""
        values = self._prepared(sources)
        kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in inputs]
        planned = values.get("plan")
        if planned is None or planned[0] != (self.strategy, kinds):
            variant = self._variant(*inputs)
            plan = planned[2] if planned and planned[1] == variant else self.plan(*inputs)
            planned = values["plan"] = ((self.strategy, kinds), variant, plan)
        return planned[2]

    def _variant(self, *inputs: Any) -> Any:
        """Returns what a plan for these inputs depends on, besides tensors and settings."""
        return self.choose(*inputs)

    def _prepared(self, sources: Sequence[torch.Tensor | None]) -> dict:
        """Returns the values derived from ``sources`` (see :meth:`Derived.values`) for the current settings, because
        settings of this module and of wrapped modules may change at any time."""
        conditions = self._derived.conditions
        if conditions is None or conditions.first_change(vars(self)) is not None:
            self._derived.clear()
            self._derived.conditions = Watch(_settings(self))
        return self._derived.values(sources)

    def clear_derived(self) -> None:
        """Drops folded and packed weights. Needed only after writes that :class:`Derived` cannot detect."""
        for module in self.modules():
            if isinstance(module, FusedModule):
                module._derived.clear()

    def places(self) -> list[tuple[dict, str]]:
        """Returns (dict, key) of each parameter and buffer that a plan stores, unchanged, folded or packed.

        Tensors that a plan reads in each call are not included. The tensor at a place may be None.
        """
        return [] if self.strategy in self.live_strategies else self.held_places()

    def held_places(self) -> list[tuple[dict, str]]:
        """Returns (dict, key) of each parameter and buffer of the module. The tensor may be None."""
        stores = [store for module in self.modules() for store in (module._parameters, module._buffers)]
        return [(store, key) for store in stores for key in store]

    def train(self: _Module, mode: bool = True) -> _Module:
        """Sets the mode. A change signals that weights may have changed, even if :class:`Derived` detects no write."""
        if mode != self.training:
            self.clear_derived()
        return super().train(mode)

    def extra_repr(self) -> str:
        slope = f", negative_slope={self.negative_slope}" if self.activation == "leaky_relu" else ""
        strategy = f", strategy={self.strategy!r}" if self.strategy is not None else ""
        return f"activation={self.activation!r}{slope}{strategy}"


def _settings(module: nn.Module) -> Iterator[Entry]:
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in _UNPREPARED and isinstance(value, (bool, int, float, str, tuple, type(None))):
                # A reference to ``module``, which has the Watch, would be a reference cycle.
                yield ROOT if inner is module else inner, name, value


def held(module: nn.Module, name: str) -> torch.Tensor | None:
    """Returns ``getattr(module, name)``, three times faster if ``name`` is a parameter."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def held_of(module: nn.Module, *names: str) -> list[torch.Tensor]:
    """Returns the attributes ``names`` that are not None, see :func:`held`. Traceable by compilers."""
    tensors = [held(module, name) for name in names]
    return [tensor for tensor in tensors if tensor is not None]


def takes_plain_path(x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the differentiable operators must run: for gradients, transforms, autocast, tracing, subclasses."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or type(x) is not torch.Tensor or transformed():
        return True
    if torch.is_grad_enabled() and (x.requires_grad or any(tensor.requires_grad for tensor in tensors)):
        return True
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


def is_of(module: nn.Module, kind: type) -> bool:
    """Whether a call of ``module`` runs only the forward of ``kind``, without hooks or an overridden forward."""
    held = vars(module)
    return type(module) is kind and "forward" not in held and not any(held[hooks] for hooks in HOOK_KINDS)


def require_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...], kind_names: str) -> None:
    """Raises unless ``module`` is one of ``kinds`` with the forward of its class and ordinary float weights.

    TypeError: another class, an overridden ``forward``, an uninitialized lazy module, a weight that is a tensor
    subclass or not floating-point (quantized). ValueError: a parametrized or weight-normalized module, whose
    weight is computed.
    """
    name = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise TypeError(f"{name} is not initialized yet: run it once before fusing it")
    if parametrize.is_parametrized(module):
        remedy = 'call torch.nn.utils.parametrize.remove_parametrizations(module, "weight") before fusing it'
        raise ValueError(f"{name} is parametrized: {remedy}")
    base = next((kind for kind in kinds if isinstance(module, kind)), None)
    if base is None or type(module).forward is not base.forward:
        raise TypeError(f"expected {kind_names}, got {type(module).__module__}.{name}")
    if "weight" not in module._parameters and "weight" not in module._buffers:
        remedy = "call torch.nn.utils.remove_weight_norm(module), or remove_spectral_norm(module), before fusing it"
        raise ValueError(f"{name} computes its weight: {remedy}")
    weight = module.weight
    if weight is not None:
        require_float_tensor(weight, f"{name}.weight")


def require_float_tensor(tensor: torch.Tensor, name: str) -> None:
    """Raises TypeError unless ``tensor`` is a Tensor or Parameter, not a subclass, with one of FLOAT_DTYPES."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.dtype not in FLOAT_DTYPES or tensor.is_quantized:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected a float dtype of 16 to 64 bits")


def is_too_narrow(rounded: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether ``exact`` (float64) exceeds the range of the dtype of ``rounded``, its rounded copy, so that the error
    exceeds the dtype's precision. This happens only in float16, which overflows from 65,520 on and loses precision
    below 6e-5."""
    if rounded.dtype != torch.float16 or (rounded.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    lost, most = (rounded.double() - exact).abs().max(), exact.abs().max()
    return not bool(lost <= torch.finfo(rounded.dtype).eps * most)


def gelu_name(approximate: str) -> str:
    """Returns the package's name of ``nn.GELU(approximate)``. Raises ValueError unless "none" or "tanh"."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in names:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return names[approximate]
