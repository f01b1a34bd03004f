"""Converted models for deployment: what is promised not to change is not looked at in each call."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from .frozen import Frozen, FrozenError
from .guarded import guarded_forward
from .on_host import anchor_of
from .refusals import frozen_by, refuse_changes
from .shallow_copy import StateForCopies

_Model = TypeVar("_Model", bound=nn.Module)


def freeze(model: _Model, originals: str | None = None) -> _Model:
    """Take the weights, modules, attributes and code of a converted ``model`` for what they are now; returns ``model``.

    A call then looks at its arguments, at the modes and switches of the process (gradients, autocast, default dtype
    and device, hooks of all modules, watching modes), at the mode of the model and at its first parameter, and no more.
    Calls of other kinds run the original forward as before.

    A change is a :class:`FrozenError`. At once, and without effect: ``train()``, ``load_state_dict()``, a ``.to()`` or
    ``.half()`` that changes something, of the model or of a module within it, but of modules of which the forward
    itself calls such a method; ``kfconvert_refresh()``; a parameter, buffer or submodule that is assigned or registered
    in one of these, as by ``weight_norm``, ``spectral_norm`` and pruning (``prune.remove`` has zeroed the weight by
    then). At the next call: the first parameter replaced or written in place, as every step of an optimizer does and
    the ``load_state_dict()`` of a model around this one, and ``torch.func.functional_call``; the mode. Within 100
    calls: what an unfrozen model sees in each, such as other weights written in place, what ``del``,
    ``nn.Sequential.insert`` and ``pop`` take from or put into the dicts of a module, hooks on submodules, attributes
    and patched code; until then a call may compute with both the old and the new. Not seen are writes that leave no
    trace in a tensor, also with ``check_weights``. A call that runs the original forward may write attributes, such as
    a table for another image size: later calls run the original forward until these are as they were.

    The class, ``state_dict()``, ``kfconvert.save`` and ``kfconvert_info()`` stay; under "frozen", the latter has the
    bytes that lie in host memory. A deep copy is a converted model that is not frozen, as is one that was loaded.

    A model in which nothing was fused stays as it is, and may change: nothing depends on what it is now.

    Args:
        model: a model that was converted, in eval mode.
        originals: with "cpu", the parameters and buffers that only the original forward needs (those of which the
            program has folded or packed copies, and others that it does not read) move to host memory. They stay the
            objects that they are; the first tensor of the model stays on its device, so that ``model.device`` does. The
            model must have been called before with inputs like those that will come. A call that the program does not
            serve, gradients, a new layout of images, compilers and ``copy.copy`` bring them back for good, with one
            warning; ``freeze`` may be called again then. Submodules called by themselves do not, but for parts that
            were converted. Nothing moves where the model is on the CPU already, or was converted in parts only. No
            other thread may call the model meanwhile.

    Raises:
        FrozenError: the model has changed since its conversion, is in train mode, was unpickled, or, with
            ``originals``, was not called yet.
        ValueError: it was not converted, or ``originals`` is neither None nor "cpu".
    """
    if originals not in (None, "cpu"):
        raise ValueError(f"originals must be None or 'cpu', not {originals!r}")
    if not isinstance(model, nn.Module) or "kfconvert_info" not in vars(model):
        raise ValueError(f"freeze takes a converted model, not {type(model).__name__}")
    forwards = [forward for module in model.modules() if (forward := guarded_forward(module)) is not None]
    if not forwards:
        return model
    frozen = frozen_by(model)
    if frozen is None:
        for forward in forwards:
            reason = forward.state.change() if forward.state else forward.other_form()
            if reason is not None:
                raise FrozenError(f"{type(model).__name__} cannot be frozen: {reason}")
        frozen = Frozen(model)
        for forward in forwards:
            forward.freeze(frozen)
        states = [forward.state for forward in forwards if forward.state]
        refuse_changes(model, frozen, lambda kind, name: any(state.reads(kind, name) for state in states))
        for module in model.modules():
            module.__dict__.setdefault("__getstate__", StateForCopies(module, vars(module).get("forward"), stays=False))
    whole, anchor = guarded_forward(model), anchor_of(model)
    if originals is not None and whole is not None and anchor is not None and anchor.device.type != originals:
        frozen.to_host(model, [variant.program for variant in whole.variants], torch.device(originals))
    return model
