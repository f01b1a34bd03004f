"""Blocks of one structure are traced once, and the graph is that of a trace of every one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from kfconvert import ModelConverter
from kfconvert.capture.blocks import replay as repetition
from kfconvert.capture.blocks.replay import Repetition


class Block(nn.Module):
    """A residual layer with an attribute that numbers it, as the blocks of transformers have."""

    def __init__(self, index: int, width: int = 8):
        super().__init__()
        self.index = index
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x + torch.relu(self.inner(x)))
        return x if mask is None else x.masked_fill(mask, 0.0)


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, count: int = 4):
        super().__init__()
        self.blocks = nn.ModuleList(kind(index) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def traced(model: nn.Module, x: Tensor, repeated: bool) -> tuple[torch.export.ExportedProgram, int]:
    """The exported program, and how many calls of blocks were replayed for it."""
    blocks = Repetition(model)

    def run():
        return torch.export.export(model, (x,), dynamic_shapes=({0: Dim.AUTO},), strict=False)

    with torch.no_grad():
        return (blocks.trace(model, run) if repeated else run()), blocks.replayed


def attributes(model: nn.Module) -> dict[tuple[str, str], type]:
    return {(name, key): type(v) for name, module in model.named_modules() for key, v in vars(module).items()}


def check(model: nn.Module, replays: int, x: Tensor | None = None) -> None:
    model.eval()
    x = torch.randn(3, 8) if x is None else x
    plain, _ = traced(model, x, repeated=False)
    before = attributes(model)
    program, count = traced(model, x, repeated=True)
    assert attributes(model) == before
    assert count == replays
    pairs = list(zip(program.graph.nodes, plain.graph.nodes, strict=True))
    counterpart = dict(pairs)
    for node, expected in pairs:
        args, kwargs = fx.map_arg((node.args, node.kwargs), counterpart.__getitem__)
        assert (node.op, node.target, args, kwargs) == (
            expected.op,
            expected.target,
            expected.args,
            expected.kwargs,
        )
        assert node.meta.get("nn_module_stack") == expected.meta.get("nn_module_stack")
        assert str(node.meta.get("val")) == str(expected.meta.get("val"))
    other = torch.cat([x, x])
    with torch.no_grad():
        for given in (x, other):
            torch.testing.assert_close(program.module()(given.clone()), model(given.clone()), rtol=0, atol=0)


def test_all_but_the_first_of_equal_blocks_are_replayed():
    check(Chain(), replays=3)


def test_blocks_within_blocks():
    class Outer(nn.Module):
        def __init__(self, index: int):
            super().__init__()
            self.chain = Chain(count=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.chain(x) * 2

    check(Chain(Outer, 3), replays=2 + 2)


def test_blocks_that_use_the_integer_in_which_they_differ_are_told_apart():
    class Shifted(Block):
        def __init__(self, index: int):
            super().__init__(index)
            self.shift = index % 2

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.roll(self.shift, 1) if self.shift else x)

    check(Chain(Shifted), replays=2)


def test_a_model_that_catches_errors_of_its_own_making():
    class Trying(Block):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x) * (self.index + 1)
            except Exception:
                return x

    check(Chain(Trying), replays=0)


def test_blocks_of_other_values_or_weights_of_other_shapes_are_traced():
    chain = Chain(count=2)
    chain.blocks[1].norm.eps = 0.5
    check(chain, replays=0)
    chain = Chain(count=2)
    chain.blocks[1].inner = nn.Linear(8, 8, bias=False)
    check(chain, replays=0)


def test_another_size_or_another_argument_is_traced_anew():
    class Varied(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third, fourth = self.blocks
            mask = x > 0
            return third(second(torch.cat([first(x), x])))[: x.shape[0]] + fourth(x, mask)

    check(Varied(), replays=1)


def test_a_keyword_is_as_good_as_a_position_for_itself_only():
    class Named(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third, fourth = self.blocks
            return fourth(x=third(x=second(first(x))))

    check(Named(), replays=2)


def test_one_tensor_given_twice_is_not_like_two():
    class Two(Block):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x) + y

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third, fourth = self.blocks
            y = first(x, x)
            z = second(y, x)
            return fourth(third(z, y), third.inner.bias.expand_as(z).clone())

    check(Model(Two), replays=2)


class Store:
    kept: Tensor | float = 0.0


class Storing(Chain):
    """Blocks that hand each other a tensor behind the back of their arguments."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__(kind)
        self.store = Store()
        for block in self.blocks:
            block.store = self.store

    def forward(self, x: Tensor) -> Tensor:
        self.store.kept = x.exp()
        x = super().forward(x)
        self.store.kept = 0.0
        return x


def test_a_block_that_reads_what_it_was_not_given_is_traced():
    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.store.kept

    check(Storing(Reading), replays=0)


def test_blocks_that_hand_each_other_tensors_in_secret_are_traced_anew():
    class Passing(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if isinstance(self.store.kept, Tensor):
                self.store.kept = 1.0
            self.store.kept = self.store.kept * 2
            return y * self.store.kept

    model, x = Storing(Passing).eval(), torch.randn(3, 8)
    fused = ModelConverter(validate_accuracy=False, select="all").convert_model(model, example_inputs=x)
    assert fused.kfconvert_info()["total_replaced"] > 0
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


def test_a_block_that_keeps_something_is_traced():
    class Keeping(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            total = sum(block.kept for block in self.blocks)
            for block in self.blocks:
                block.kept = None
            return total

    model = Model(Keeping)
    for block in model.blocks:
        block.kept = None
    check(model, replays=0)


def test_a_block_that_fills_a_list_is_traced():
    class Filling(Block):
        def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
            found.append(super().forward(x))
            return found[-1]

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            found: list[Tensor] = []
            for block in self.blocks:
                x = block(x, found)
            return sum(found)

    check(Model(Filling), replays=0)


def test_a_block_that_writes_to_its_argument_is_traced():
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            x.mul_(2)
            return y

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            total = x * 0
            for block in self.blocks:
                total = total + block(x)
            return total

    check(Model(Writing), replays=0)


def test_outputs_may_be_arguments_parts_of_them_and_tuples():
    class Passing(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None, int]:
            y = super().forward(x)
            return y, x, None, 3

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            total = x
            for block in self.blocks:
                x, before, nothing, three = block(x)
                assert nothing is None
                total = total + three * before
            return total + x

    check(Model(Passing), replays=3)


def test_a_view_that_is_written_to_afterwards():
    class Cutting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :4]

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            total = x
            for block in self.blocks:
                cut = block(x)
                cut.add_(1)
                total = total + torch.cat([cut, cut], 1)
            return total

    check(Model(Cutting), replays=3)


def test_a_block_with_a_hook_inside_is_traced():
    chain = Chain(count=3)
    seen = []
    for block in chain.blocks:
        block.inner.register_forward_hook(lambda module, args, output: seen.append(module))
    traced(chain.eval(), torch.randn(3, 8), repeated=True)
    assert set(seen) == {block.inner for block in chain.blocks}


def test_sizes_that_depend_on_data_are_traced():
    class Choosing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.flatten().nonzero().float().sum()

    model, x = Chain(Choosing).eval(), torch.randn(3, 8)
    program, count = traced(model, x, repeated=True)
    assert count == 0
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x))


def test_an_error_of_the_model_is_raised_as_it_is():
    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        traced(Chain(Failing), torch.randn(3, 8), repeated=True)


def test_an_error_of_the_recording_costs_the_repetition_only(monkeypatch):
    def failing(*args):
        raise AttributeError("another version of PyTorch")

    failing.__code__ = failing.__code__.replace(co_filename=repetition.__file__)
    monkeypatch.setattr(repetition._Record, "of", failing)
    check(Chain(), replays=0)


# What was found by looking for a model whose graph the replay makes wrong.

MODE = ContextVar("MODE", default=False)


class Tokens(nn.Module):
    """A token model, whose batch and sequence are free: ``step`` calls its blocks."""

    def __init__(self, kind: type[nn.Module], step: Callable[[int, nn.Module, Tensor], Tensor]):
        super().__init__()
        self.embedding, self.step = nn.Embedding(20, 8), step
        self.blocks = nn.ModuleList(kind(index) for index in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, length = input_ids.shape
        x = self.embedding(input_ids) + torch.zeros(batch, length, 8)
        for index, block in enumerate(self.blocks):
            x = self.step(index, block, x)
        return x


class Causal(Block):
    def __init__(self, index: int):
        super().__init__(index)
        self.causal = False

    def forward(self, x: Tensor) -> Tensor:
        q = super().forward(x)[:, None]
        causal = self.causal or MODE.get()
        return x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)[:, 0]


def toggled(index: int, block: nn.Module, x: Tensor) -> Tensor:
    block.causal = True
    first = block(x)
    block.causal = False
    return first + block(x)


def told_in_secret(index: int, block: nn.Module, x: Tensor) -> Tensor:
    token = MODE.set(index == 0)
    x = block(x)
    MODE.reset(token)
    return x


class Rolling(Block):
    def forward(self, x: Tensor, amount: Tensor | None = None) -> Tensor:
        return super().forward(x).roll(int(amount), 1)


class Asking(Block):
    """Looks at the kind of an integer, which nothing can tell from a look at another object."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.roll(self.index + 1, 1) if isinstance(self.index, int) else y


class Writing(Asking):
    def forward(self, x: Tensor) -> Tensor:
        x += torch.relu(self.inner(x))
        return super().forward(x)


class Stopping(Tokens):
    """Cannot be captured as a whole."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = super().forward(input_ids)
        return x if x.sum() > 1e9 else x * 2


@pytest.mark.parametrize(
    ("kind", "step", "model"),
    [
        (Causal, toggled, Tokens),
        (Causal, told_in_secret, Tokens),
        (Rolling, lambda index, block, x: block(x, torch.tensor(index)), Tokens),
        (Asking, lambda index, block, x: block(x), Tokens),
        (Writing, lambda index, block, x: block(x * 1.5), Tokens),
        (Asking, lambda index, block, x: block(x), Stopping),
        (Block, lambda index, block, x: block(x), Stopping),
    ],
)
def test_the_converted_model_computes_what_the_model_does(kind, step, model):
    original = model(kind, step).eval()
    converter = ModelConverter(validate_accuracy=False, select="all")
    fused = converter.convert_model(original, example_inputs=torch.randint(0, 20, (2, 5)))
    assert converter.conversion_stats["total_replaced"] > 0
    with torch.no_grad():
        for shape in ((2, 5), (3, 7), (1, 5)):
            ids = torch.randint(0, 20, shape)
            torch.testing.assert_close(fused(ids), original(ids), rtol=1e-4, atol=1e-4)


def test_other_types_under_autocast_are_traced_anew():
    class Mixed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, second, *_ = self.blocks
            with torch.autocast("cpu", torch.bfloat16):
                y = first.inner(x)
            with torch.autocast("cpu", torch.float16):
                return second.inner(x).float() + y.float()

    check(Mixed(), replays=0)


def test_zero_and_minus_zero_are_two_arguments():
    class Signed(Block):
        def forward(self, x: Tensor, sign: float = 1.0) -> Tensor:
            return torch.copysign(super().forward(x), torch.full_like(x, sign))

    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third, fourth = self.blocks
            return first(x, 0.0) + second(x, -0.0) + third(x, 0.0) + fourth(x, 1.0)

    check(Model(Signed), replays=1)


def test_sizes_that_are_first_computed_within_a_block_cost_one_more_recording():
    class Sized(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(x.shape[0], -1).view(x.shape)

    class Plain(Tokens):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embedding(input_ids)
            for block in self.blocks:
                x = block(x)
            return x

    check(Plain(Sized, toggled), replays=1, x=torch.randint(0, 20, (3, 5)))
