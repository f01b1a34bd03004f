"""Calls of a converted model that require gradients: whether a program can serve them, and the backward pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...inputs import MAX_SPELLINGS
from ..recording.program_errors import Fallback
from ..recording.variant import Variant
from ..state.model_state import ModelState
from .original_forwards import originals
from .recompute import has_reentrant_checkpoint, is_connected, run_recorded

_CHANGED_IN_BETWEEN = "the model was changed between forward and backward, which recomputes it: "


@dataclass
class GradientCall:
    """One call for ``variant`` that autograd records.

    Args:
        state: the state of ``model``. This object keeps the model alive for a later backward pass.
        forward_of: returns the forward of ``model`` from before its conversion.
        parameters: the parameters of the model, in the order of ``state``.
        leaves: the flat arguments.
    """

    variant: Variant
    state: ModelState
    model: nn.Module
    forward_of: Callable[[nn.Module], Callable[..., Any]]
    parameters: list[torch.Tensor]
    leaves: list[Any]

    def run(self) -> tuple[Any, ...]:
        """Return the flat outputs of the program; backward recomputes the original. Raises Fallback where backward
        could not compute the gradients."""
        differentiable = self._refusal() or self._differentiable()
        if isinstance(differentiable, str):  # a reason
            raise Fallback(f"{differentiable}, and the call requires gradients")
        region, program = self.variant.region, self.variant.program
        unchanged = program.unchanged()

        def original(flat: list[Any]) -> Any:
            if not unchanged.holds_for(program.tensors()):
                raise RuntimeError(_CHANGED_IN_BETWEEN + "a weight, buffer or attribute has a new value")
            with originals(), self._as_in_forward():
                return region.flat_outputs(self.forward_of(self.model), flat)[0]

        return run_recorded(
            self.variant.flat, original, self.parameters, self.leaves, differentiable, program.tensors()
        )

    def _refusal(self) -> str | None:
        """The reason why a later backward pass cannot compute gradients, as known without a run of the original."""
        region, known = self.variant.region, self.state.parameters
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # the stubs lack it
            return "saved-tensor hooks are disabled"
        if region.autocast is not None:
            return "it was converted under autocast"
        if region.is_random:
            return "it draws random numbers"
        if region.communicates or region.shards:
            return "it runs on several ranks"
        if region.counts_statistics:
            return "a norm layer updates its statistics in each call"
        if self.state.asks_for_gradients:
            return f"the model's code reads {self.state.asks_for_gradients}"
        if region.returns_inputs:
            return "it returns an input or a weight unchanged"
        if not all(map(operator.is_, self.parameters, known)) or len(self.parameters) != len(known):
            # torch.func.functional_call replaces parameters during one call only, and backward comes later.
            return "its parameters differ from the converted ones"
        if any(map(_has_hooks, self.parameters)):
            return "a parameter has hooks, which backward would call too often"
        if self.state.hooked_backward is not None:
            return self.state.hooked_backward
        if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in self.leaves):
            return "an argument is an inference tensor"
        ours = {id(parameter) for parameter in self.parameters}
        if any(tensor.requires_grad and id(tensor) not in ours for tensor in self.variant.program.tensors()):
            return "a buffer or an attribute requires a gradient"
        return None

    def _differentiable(self) -> Any:
        """Which flat outputs have a gradient, depending on which parameters and arguments require one, as a tuple of
        bools; or the reason why gradients cannot be computed later. One run of the original shows it."""
        tensors = (*self.parameters, *(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)))
        wanted = bytes(tensor.requires_grad for tensor in tensors)
        known = self.variant.region.differentiable
        if wanted not in known:
            if len(known) >= MAX_SPELLINGS:
                known.clear()
            known[wanted] = self._look_up_differentiable()
        return known[wanted]

    def _look_up_differentiable(self) -> tuple[bool, ...] | str:
        # Hooks on saved tensors (checkpoints, offloading) must not receive those of this run. A hook that returned its
        # tensor would make a reference cycle.
        no_hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
        with originals(), torch.enable_grad(), no_hooks:
            outputs, _ = self.variant.region.flat_outputs(self.forward_of(self.model), self.leaves)
        if is_connected(outputs):
            return "one of its outputs is computed from another"
        if has_reentrant_checkpoint(outputs):
            return "it uses a reentrant checkpoint"
        return tuple(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs)

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Context manager for a backward pass that restores the modes of the forward pass: eval mode, without autocast.

        Raises:
            RuntimeError: another change would lead to different gradients.
        """
        training = [module for module in self.model.modules() if module.training]
        devices = {parameter.device.type for parameter in self.parameters} or {"cpu"}
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            try:
                for module in training:
                    module.training = False
                current = [store.get(key) for store, key in self.state.parameter_places]
                reason = self.state.refusal() or self.state.hooked_backward
                if reason is None and not all(map(operator.is_, current, self.state.parameters)):
                    reason = "a parameter was replaced"
                if reason is None and any(map(_has_hooks, self.parameters)):
                    reason = "hooks were registered on a parameter"
                if reason is not None:
                    raise RuntimeError(_CHANGED_IN_BETWEEN + reason)
                yield
            finally:
                for module in training:
                    module.training = True


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
