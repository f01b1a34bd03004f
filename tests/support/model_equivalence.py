"""The promise of a conversion, checked on one described model: the same outputs, gradients, state and side effects."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from kfconvert import ConversionError, ModelConverter
from kfconvert.accuracy.comparison import ERROR_RATIO, compare
from kfconvert.accuracy.float64_run import Reference

from .adapter_changes import inject
from .changes import without_frames
from .random_models import BATCH, Chain, Description, build, call_arguments, laid_out, model_inputs
from .state_changes import CHANGES, Alike, Subject

# The largest error over a few numbers is not reliable: where the original's error on the very inputs is too small to
# allow the conversion's, its worst error over this many other inputs of the same kind, and other weights, is used.
OTHER_INPUTS = 240
# A site may be rejected for rounding, not for computing something else: largest errors in reasons, by dtype.
ROUNDING = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}

# Each step of a computation may round by as much as its inputs were.
STEPS = 10
# A graph without fusions rounds a few times otherwise than the model itself, at most.
GRAPH_STEPS = 32


class Pair:
    """A model, its conversion, and its float64 twin."""

    def __init__(self, description: Description, adapted: bool = False):
        self.description = description
        self.original = build(description)
        if adapted:
            inject(self.original)
        self.original.eval()
        state = copy.deepcopy(self.original.state_dict())
        example = call_arguments(description, model_inputs(description))
        before = copy.deepcopy(example)
        converter = ModelConverter(select="all")
        with patch("kfconvert.conversion.pipeline.time", lambda *_: None):  # no assertion here is about speed
            try:
                self.converted = converter.convert_model(self.original, example_inputs=example)
            except ConversionError as error:
                # Whether a view fits a layout, say, is up to the version of PyTorch.
                assume("does not accept" not in str(error))
                raise
        self.stats = converter.conversion_stats
        _assert_equal(example, before, "the example inputs were written to by the conversion")
        _assert_equal(dict(self.original.state_dict()), dict(state), "the state of the original changed")
        _assert_equal(dict(self.converted.state_dict()), dict(state), "the converted model has another state")
        self.twin = exact_twin(self.original)

    def assert_reasons(self) -> None:
        """What was left alone has a reason, and none of the reasons is a wrong result."""
        stats = self.stats
        reasons = [stats["reverted"], *(site["reason"] for site in stats["sites"])]
        assert stats["total_replaced"] or stats["nothing_fused"]
        for region in stats["regions"]:
            assert region["captured"] or region["reason"]
        for site in stats["sites"]:
            assert site["status"] == "applied" or site["reason"]
        allowed = ROUNDING[self.narrowest()]
        for reason in filter(None, reasons):
            own = re.search(r"the original has ([\d.e+-]+)", reason)
            if own and float(own[1]) >= 1:
                continue  # nothing of the original's outputs is right: more noise than that says nothing
            if own and float(own[1]) == 0 and "error inf of its scale" in reason:
                continue  # the outputs are zeros: there is no scale
            error = re.search(r"error ([\d.e+-]+|nan|inf)", reason)
            if "captured graph itself differs" in reason:
                # An activation that is written out is computed by its operator, which rounds otherwise in its tails.
                assert error and float(error[1]) < GRAPH_STEPS * torch.finfo(getattr(torch, self.narrowest())).eps, (
                    reason
                )
                continue
            noise = re.search(r"rounding its inputs alone gives ([\d.e+-]+|nan|inf)", reason)
            bound = max(allowed, STEPS * float(noise[1])) if noise else allowed
            if error and float(error[1]) >= bound and own and float(own[1]) == 0:
                bound = max(bound, STEPS * self._noise())
            assert error is None or float(error[1]) < bound, reason
            assert error or "dropped after validation" not in reason, reason

    def _noise(self) -> float:
        """How far the outputs of the original move, relative to their scale, where its weights are rounded otherwise. A
        model in float64 is its own reference, whose error is 0 though it may return nothing but what rounding left."""
        nudged, generator = copy.deepcopy(self.original), torch.Generator().manual_seed(0)
        outputs = []
        with torch.no_grad():
            for value in nudged.parameters():
                noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5
                value.copy_(value.double() * (1 + torch.finfo(torch.float64).eps * 2 * noise))
            for model in (self.original, nudged):
                outputs.append(_result(model, call_arguments(self.description, model_inputs(self.description))))
        error = compare(Reference(outputs[0], "the original"), *outputs).optimized_error
        return error.max_rel if error else 0.0

    def narrowest(self) -> str:
        text = repr(self.description)
        return next(name for name in ("bfloat16", "float16", "float32", "float64", "") if name in text) or "float32"

    def hits(self) -> int:
        return self.converted.kfconvert_info()["guard"]["hits"]

    def assert_same(self, inputs: Callable[[int], list[Tensor]], what: str, full: bool = False) -> None:
        """Same outputs and effects on ``inputs(0)``, without gradients; skipped where the original cannot run."""
        arguments = [call_arguments(self.description, inputs(0), full) for _ in range(2)]
        with torch.no_grad():
            ours = _result(self.original, arguments[0])
            if isinstance(ours, Exception):
                return
            theirs = self.converted(*arguments[1])
        _assert_equal(arguments[1], arguments[0], f"{what}: other effects on the inputs")
        assert _aliases(theirs, arguments[1]) == _aliases(ours, arguments[0]), f"{what}: other outputs are inputs"
        threshold = 1e-6
        verdict = compare(self._exact(self.twin, inputs(0), full, ours), ours, theirs, threshold)
        if not verdict.passed and verdict.optimized_error is not None:
            # Outputs may be rounded once more than the original's, of which some are exact by chance.
            rounding = 2 * torch.finfo(getattr(torch, self.narrowest())).eps
            threshold = max(threshold, rounding, ERROR_RATIO * self._own_error(inputs, full), STEPS * self._noise())
            verdict = compare(self._exact(self._twin_of_converted(), inputs(0), full, ours), ours, theirs, threshold)
        assert verdict.passed is not False, f"{what}: {verdict.reason}"  # None where there is nothing but NaN

    def _twin_of_converted(self) -> nn.Module:
        """The twin with the weights of the conversion, where these are the original's but for how a step of an
        optimizer, which may divide by a gradient's size, has rounded them."""
        theirs, ours = self.original.state_dict(), self.converted.state_dict()
        twin = copy.deepcopy(self.twin)
        named = theirs.keys() == ours.keys() == twin.state_dict().keys()
        if named and all(_is_near(value, ours[name]) for name, value in theirs.items()):
            twin.load_state_dict(ours)
        return twin

    def _exact(self, twin: nn.Module, tensors: list[Tensor], full: bool, fallback: Any) -> Reference:
        tensors = [x.double() if x.is_floating_point() else x for x in tensors]
        with torch.no_grad():
            outputs = _result(twin, call_arguments(self.description, tensors, full))
        if isinstance(outputs, Exception):
            return Reference(fallback, f"original itself ({outputs})")
        return Reference(outputs, "float64 twin of the original")

    def _own_error(self, inputs: Callable[[int], list[Tensor]], full: bool) -> float:
        """The worst of the original on other inputs, with slightly other weights: inputs may not show in outputs.

        In half types the original's weights are rounded once more than those of its twin, as folded ones are."""
        original, twin = copy.deepcopy((self.original, self.twin))
        state, worst = copy.deepcopy(original.state_dict()), 0.0
        generator = torch.Generator().manual_seed(0)
        for seed in range(1, 1 + OTHER_INPUTS):
            factor = 1 + torch.rand((), generator=generator) / 32
            for name, value in original.state_dict().items():
                value.copy_(state[name] * factor.to(value.dtype) if value.is_floating_point() else state[name])
            twin.load_state_dict(original.state_dict())
            for value in original.parameters():
                if value.dtype in (torch.float16, torch.bfloat16):
                    eps = torch.finfo(value.dtype).eps
                    noise = torch.rand(value.shape, generator=generator) - 0.5
                    value.data.copy_(value.data.float() * (1 + eps * noise))
            with torch.no_grad():
                ours = _result(original, call_arguments(self.description, inputs(seed), full))
            if isinstance(ours, Exception):
                continue
            error = compare(self._exact(twin, inputs(seed), full, ours), ours, ours).original_error
            worst = max(worst, error.max_rel if error else 0.0)
        return worst

    def _assert_as_exact(self, found: list[list[Tensor | None]], atol: float) -> None:
        """Where rounding may be all that differs: our gradients are as near to those in float64 as the original's."""
        twin = _gradients(copy.deepcopy(self.original).double(), self.description, torch.float64)
        assert not isinstance(twin, Exception), "other gradients"
        for exact, theirs, ours in zip(twin, *found):
            if exact is not None and theirs is not None and ours is not None:
                errors = [(each.double() - exact).abs().max().item() for each in (theirs, ours)]
                assert errors[1] <= 4 * errors[0] + atol, "other gradients"

    def assert_same_gradients(self) -> None:
        """In eval mode with gradients; skipped where the original has none."""
        found = [_gradients(model, self.description) for model in (self.original, self.converted)]
        if isinstance(found[0], Exception):
            return
        if isinstance(found[1], Exception):
            raise AssertionError("with gradients the converted model raises") from found[1]
        assert len(found[0]) == len(found[1])
        for theirs, ours in zip(*found):
            assert (theirs is None) is (ours is None), "other parameters or inputs have gradients"
            if theirs is not None:
                # The graph that backward recomputes may add the contributions to one gradient in another order.
                scale = ours.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
                atol = 16 * torch.finfo(ours.dtype).eps * scale
                if not torch.allclose(theirs, ours, rtol=0, atol=atol, equal_nan=True):
                    self._assert_as_exact(found, atol)

    def assert_same_training(self) -> None:
        """Outputs and statistics in train mode under the same seed; skipped where the original cannot run."""
        results = []
        for model in (self.original, self.converted):
            model.train()
            torch.manual_seed(7)
            results.append(_result(model, call_arguments(self.description, model_inputs(self.description, seed=3))))
        if not isinstance(results[0], Exception):
            _assert_equal(results[1], results[0], "train mode: other outputs")
            states = [dict(model.state_dict()) for model in (self.converted, self.original)]
            _assert_equal(*states, "train mode: other state")
        self.original.eval(), self.converted.eval()
        self.twin.load_state_dict(self.original.state_dict())

    def assert_same_when_treated(self, treated: Sequence[Treatment]) -> None:
        """The same outputs after each of the changes, made to both; and after those that are taken back."""
        both = Alike(*(Subject(model, self._arguments) for model in (self.original, self.converted)))
        done: list[str] = []
        with ExitStack() as process_wide:
            for title, place, way, undone in treated:
                change = CHANGES[title]
                if not change.targets(self.original) or (way == "thread" and not change.threads):
                    continue
                if way == "train":
                    both.each(nn.Module.train)
                done.append(f"{title} {place} {way}".rstrip())
                try:
                    undo = both.apply(change, place, thread=way == "thread")
                except AssertionError:
                    raise
                except Exception:  # both models refuse
                    undo = None
                if change.process_wide and undo is not None:
                    process_wide.callback(undo)
                both.each(nn.Module.eval)
                self._assert_same_now(both, done)
                # A dtype concerns the inputs as well: it stays for no other change.
                if undo is not None and (undone or both.original.dtype is not None):
                    process_wide.pop_all().close() if change.process_wide else undo()
                    both.original.dtype = both.converted.dtype = None
                    both.each(nn.Module.eval)
                    done.append("undone")
                    self._assert_same_now(both, done)
            both.each(nn.Module.eval)
        self._assert_same_now(both, [*done, "all that concerns the process undone"])

    def _arguments(self, seed: int) -> tuple[Any, ...]:
        return call_arguments(self.description, model_inputs(self.description, seed=seed))

    def _assert_same_now(self, both: Alike, done: list[str]) -> None:
        results = [subject.call() for subject in both.both]
        refused = [isinstance(result, Exception) for result in results]
        assert refused[0] is refused[1], f"after {done}: {results[1]!r} instead of {results[0]!r}"
        if refused[0]:
            return
        self.twin = exact_twin(self.original)

        def inputs(seed: int) -> list[Tensor]:
            tensors, dtype = model_inputs(self.description, seed=seed), both.original.dtype
            return [x.to(dtype) if dtype and x.is_floating_point() else x for x in tensors]

        self.assert_same(inputs, f"after {done}")

    def change_weights(self) -> None:
        """The same change, in place, in both models and the twin."""
        with torch.no_grad():
            for model in (self.original, self.converted):
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        tensor.mul_(1.25)
        self.twin.load_state_dict(self.original.state_dict())  # as they were rounded


def exact_twin(original: nn.Module) -> nn.Module:
    """A copy of a random model, and of all that was done to it, with the same weights and in float64 throughout."""
    # The weight that an older weight norm has computed is no leaf of autograd, and such a tensor cannot be copied.
    held = [value for module in original.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    twin = copy.deepcopy(original, {id(tensor): tensor.detach().clone() for tensor in held if not tensor.is_leaf})
    for module in twin.modules():
        if isinstance(module, Chain):
            module.exact = True
    return twin.double()


# A change, which of its places, whether it is made in train mode or by another thread, whether it is undone.
Treatment = tuple[str, int, str, bool]


def treatments(most: int) -> st.SearchStrategy[list[Treatment]]:
    """Up to ``most`` changes that random models have places for."""
    titles = [title for title, change in CHANGES.items() if change.cheap and not change.special]
    ways = st.sampled_from(["", "", "train", "thread"])
    each = st.tuples(st.sampled_from(titles), st.integers(0, 9), ways, st.booleans())
    return st.lists(each, min_size=most // 2, max_size=most)


def assert_converts(description: Description, treated: Sequence[Treatment] = (), adapted: bool = False) -> Pair:
    """Raise AssertionError where the conversion of the described model breaks its promise.

    Args:
        treated: changes made to both models afterwards, with a call after each.
        adapted: the model has adapters before it is converted.
    """
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        pair = Pair(description, adapted)
        pair.assert_reasons()

        def inputs(batch: int) -> Callable[[int], list[Tensor]]:
            return lambda seed: model_inputs(description, batch, seed)

        def laid(layout: str) -> Callable[[int], list[Tensor]]:
            return lambda seed: [laid_out(x, layout) for x in model_inputs(description, BATCH, seed)]

        def special(value: float) -> Callable[[int], list[Tensor]]:
            return lambda seed: [_with(x, value) for x in model_inputs(description, BATCH, seed)]

        pair.assert_same(inputs(BATCH), "the example")
        captured = pair.stats["regions"][0]["captured"] and not pair.stats["given_back"]
        assert pair.hits() or not captured, "the example missed"
        pair.assert_same(inputs(BATCH), "with the optional argument", full=True)
        pair.assert_same(inputs(5), "batch size 5")
        pair.assert_same(inputs(1), "batch size 1")
        for layout in ("strided", "transposed", "channels_last"):
            pair.assert_same(laid(layout), f"{layout} inputs")
        # PyTorch takes its kernel for attention by the layout of the inputs, and not all of them spread NaN as far.
        with sdpa_kernel(SDPBackend.MATH) if "attention" in repr(description) else nullcontext():
            pair.assert_same(special(float("nan")), "NaN")
        pair.assert_same_gradients()
        pair.change_weights()
        pair.assert_same(inputs(BATCH), "changed weights")
        pair.assert_same_training()
        pair.assert_same(inputs(BATCH), "after training")
        pair.assert_same_when_treated(treated)
    return pair


def _is_near(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor) or value.shape != other.shape:
        return False
    scale = value.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if value.numel() else 0.0
    return torch.allclose(value.double(), other.double(), rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


def _with(x: Tensor, value: float) -> Tensor:
    if x.is_floating_point():
        x = x.clone()
        x[0].flatten()[0] = value
        x[(0,) * x.dim()] = value
    return x


def _result(model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """The outputs, or the exception."""
    try:
        return model(*arguments)
    except Exception as error:  # an original may refuse a shape, a layout or a mode in any way
        return without_frames(error)


def _gradients(model: nn.Module, description: Description, dtype: torch.dtype | None = None) -> Any:
    """Gradients of a weighted sum of the outputs with respect to parameters and inputs, or the exception; of inputs of
    the same values in ``dtype``."""
    inputs = model_inputs(description, seed=2)
    tensors = [x.to(dtype or x.dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
    model.zero_grad(set_to_none=True)
    try:
        outputs = pytree.tree_leaves(model(*call_arguments(description, tensors)))
        floating = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
        loss = sum((x.double() * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum() for x in floating)
        loss.backward()
    except Exception as error:
        return without_frames(error)
    return [x.grad for x in (*model.parameters(), *tensors)]


def _aliases(outputs: Any, arguments: Any) -> list[list[int]]:
    """For each output tensor the places of the inputs whose storage it shares."""
    inputs = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    pointers = [x.untyped_storage().data_ptr() for x in inputs]
    found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return [[i for i, p in enumerate(pointers) if p == x.untyped_storage().data_ptr()] for x in found]


def _assert_equal(ours: Any, theirs: Any, message: str) -> None:
    """Same structure, and tensors equal to the bit, NaN being NaN."""
    left, right = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    assert left[1] == right[1], message
    for one, other in zip(left[0], right[0]):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert one.shape == other.shape and one.dtype is other.dtype, message
            assert torch.equal(one.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5)), message
            assert torch.equal(one.isnan(), other.isnan()), message
        else:
            assert one == other, message
