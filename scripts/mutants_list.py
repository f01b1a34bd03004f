"""The faults that mutants.py puts in by hand, and those that a library draws and that change no result.

Both are found by their text, wherever in the package it stands.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """``text``, which stands in the package once, becomes ``fault``; ``what`` is wrong then."""

    what: str
    text: str
    fault: str


class Equivalent(NamedTuple):
    """A line that may become ``fault``: why no result changes."""

    text: str
    fault: str
    reason: str


# Each of these was in the package at some time without a test, or with a single one, that noticed.
FAULTS = (
    Fault(
        "a change of the mode makes no plan stale",
        "self.stale, self.state.announced = True, False",
        "self.stale, self.state.announced = self.stale, False",
    ),
    Fault(
        "a refresh leaves the plans",
        "variant.program.clear()\n        if self.state is not None:",
        "pass\n        if self.state is not None:",
    ),
    Fault(
        "a refresh leaves packed weights",
        "self.modules[name].clear_derived()",
        "self.modules[name]",
    ),
    Fault(
        "the storage of a source is freed and used again",
        "storages = [tensor.detach() for tensor in known if tensor is not None]",
        "storages = None",
    ),
    Fault(
        "sites of one module get each other's decisions",
        "recorded.pop(0) if recorded",
        "recorded.pop() if recorded",
    ),
    Fault(
        "a bias that the model does not read is added",
        "all(n in owner and owner[n] is t for n, t in store.items())",
        "True",
    ),
    Fault(
        "only the first tensor is watched for its dtype",
        "zip(self._read, tensors, self._kinds)",
        "zip(self._read[:1], tensors, self._kinds)",
    ),
    Fault(
        "a hook is honoured once",
        "            self._watch_hooks()\n        return self.hooked",
        "            self._watch_hooks()\n            return self.hooked\n        return None",
    ),
    Fault(
        "a replaced tensor is not copied over",
        "                store[attribute] = tensor",
        "                store.setdefault(attribute, tensor)",
    ),
    Fault(
        "layer norms have the usual eps",
        'eps=captures["eps"],',
        "eps=1e-5,",
    ),
    Fault("autocast narrows float64", "        and arg.dtype != torch.float64\n", ""),
    Fault(
        "a layer norm's gradient lacks a mean",
        "shift = gw.mean(-1, keepdim=True) if self._centred else 0",
        "shift = 0",
    ),
    Fault(
        "a layer norm's weight gets the gradient of its bias",
        "zip(affine, (g * xhat, g))",
        "zip(affine, (g, g))",
    ),
    Fault("smoothing is not in the gradient of cross entropy", " - smoothing / x.shape[1]\n", "\n"),
    Fault(
        "what was dropped has a gradient",
        "activation.backward(_drop(grad, x, state, seed, sequence, p), saved, negative_slope)",
        "activation.backward(grad, saved, negative_slope)",
    ),
)

EQUIVALENT = (
    Equivalent(
        "if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):",
        "if not isinstance(expected, Tensor) and not isinstance(actual, Tensor):",
        "a tensor beside what is none raises then, which counts as a difference",
    ),
    Equivalent(
        "and math.prod(q.shape[:-2]) > 0",
        "and math.prod(q.shape[:- 1]) > 0",
        "there are rows by then, so that this product is 0 where the other is",
    ),
)
