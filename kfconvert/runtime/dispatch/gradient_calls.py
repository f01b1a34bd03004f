"""Calls of a converted model that require gradients: whether a program can serve them, and the backward pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...inputs import MAX_SPELLINGS
from ..recording.program import UnfitTensors
from ..recording.program_errors import leave_to_original
from ..recording.variant import Variant
from ..state.model_state import ModelState
from .original_forwards import originals
from .recompute import Differentiable, has_reentrant_checkpoint, is_connected, run_recorded, saved_memory, unsaved

_CHANGED_IN_BETWEEN = "the model was changed between forward and backward, which recomputes it: "


class GradientCall:
    """One call for ``variant`` that autograd records.

    Args:
        state: the state of ``model``. This object keeps the model alive for a later backward pass.
        original: the forward of ``model`` from before its conversion.
        parameters: the parameters of the model, in the order of ``state``.
        leaves: the flat arguments.
    """

    def __init__(
        self,
        variant: Variant,
        state: ModelState,
        model: nn.Module,
        original: Callable[..., Any],
        parameters: list[torch.Tensor],
        leaves: list[Any],
    ):
        self._variant, self._state, self._model, self._original = variant, state, model, original
        self._parameters, self._leaves = parameters, leaves

    def refusal(self) -> str | None:
        """The reason why this call must run the original; None where a later backward pass can compute gradients."""
        region, known = self._variant.region, self._state.parameters
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # the stubs lack it
            return "saved-tensor hooks are disabled, and the call requires gradients"
        if region.is_random:
            return "it draws random numbers, and the call requires gradients"
        if region.communicates or region.shards:
            return "it runs on several ranks, and the call requires gradients"
        if region.counts_statistics:
            return "a norm layer updates its statistics in each call, and the call requires gradients"
        if self._state.asks_for_gradients:
            return f"the model's code reads {self._state.asks_for_gradients}, and the call requires gradients"
        if region.returns_inputs:
            return "it returns an input or a weight unchanged, and the call requires gradients"
        if not all(map(operator.is_, self._parameters, known)) or len(self._parameters) != len(known):
            # torch.func.functional_call replaces parameters during one call only, and backward comes later.
            return "its parameters differ from the converted ones, and the call requires gradients"
        if any(map(_has_hooks, self._parameters)):
            return "a parameter has hooks, which backward would call too often"
        if self._state.hooked_backward is not None:
            return f"{self._state.hooked_backward}, and the call requires gradients"
        if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in self._leaves):
            return "an argument is an inference tensor, and the call requires gradients"
        ours = {id(parameter) for parameter in self._parameters}
        if any(tensor.requires_grad and id(tensor) not in ours for tensor in self._variant.program.tensors()):
            return "a buffer or an attribute requires a gradient"
        differentiable = self._differentiable()
        return f"{differentiable}, and the call requires gradients" if isinstance(differentiable, str) else None

    def run(self) -> Any:
        """Return the flat outputs of the program; backward recomputes the original. Requires that refusal() is None."""
        differentiable = self._differentiable()
        assert isinstance(differentiable, Differentiable)
        region, program = self._variant.region, self._variant.program
        unchanged = program.unchanged()

        def original(flat: list[Any]) -> Any:
            if not unchanged.holds_for(program.tensors()):
                raise RuntimeError(_CHANGED_IN_BETWEEN + "a weight, buffer or attribute has a new value")
            with originals(), self._as_in_forward():
                return region.flat_outputs(self._original, flat)[0]

        def fused(flat: list[Any]) -> tuple[Any, ...]:
            try:
                return program.run(flat)
            except UnfitTensors:
                raise
            except Exception as error:  # saved-tensor hooks from outside the program may raise
                leave_to_original(error, region, None)
                raise

        return run_recorded(fused, original, self._parameters, self._leaves, differentiable, program.tensors())

    def _differentiable(self) -> Differentiable | str:
        """Describe autograd's treatment of an original call, depending on which parameters and arguments require a
        gradient; or return the reason why gradients cannot be computed later. One run of the original shows it."""
        tensors = (*self._parameters, *(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)))
        wanted = bytes(tensor.requires_grad for tensor in tensors)
        known = self._variant.region.differentiable
        if wanted not in known:
            if len(known) >= MAX_SPELLINGS:
                known.clear()
            known[wanted] = self._look_up_differentiable()
        return known[wanted]

    def _look_up_differentiable(self) -> Differentiable | str:
        # Hooks on saved tensors (checkpoints, offloading) must not keep anything of this run.
        with originals(), torch.enable_grad(), saved_memory() as saved:
            outputs, _ = self._variant.region.flat_outputs(self._original, self._leaves)
        if is_connected(outputs):
            return "one of its outputs is computed from another"
        if has_reentrant_checkpoint(outputs):
            return "it uses a reentrant checkpoint"
        wanted = tuple(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs)
        return Differentiable(wanted, unsaved(self._leaves, saved))

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Context manager for a backward pass that restores the modes of the forward pass: eval mode, without autocast.

        Raises:
            RuntimeError: another change would lead to different gradients.
        """
        training = [module for module in self._model.modules() if module.training]
        devices = {parameter.device.type for parameter in self._parameters} or {"cpu"}
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            try:
                for module in training:
                    module.training = False
                current = [store.get(key) for store, key in self._state.parameter_places]
                reason = self._state.refusal() or self._state.hooked_backward
                if reason is None and not all(map(operator.is_, current, self._state.parameters)):
                    reason = "a parameter was replaced"
                if reason is None and any(map(_has_hooks, self._parameters)):
                    reason = "hooks were registered on a parameter"
                if reason is not None:
                    raise RuntimeError(_CHANGED_IN_BETWEEN + reason)
                yield
            finally:
                for module in training:
                    module.training = True


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
