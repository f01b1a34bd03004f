"""What the matcher does for every pattern: trees, overlaps, and the cases in which nothing may ever be fused."""

import operator

import torch
from torch import nn

from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.nodes import mark_weights
from kfconvert.graph.trees import Either, Number, Op, Together, Var, aten, required, unify
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.matching.pattern import Match, Pattern
from kfconvert.patterns import REGISTRY


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def region_of(model, *inputs):
    region = trace(model.eval(), ExampleCall(inputs))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    return region


def last_call(function):
    region = region_of(Function(function), torch.randn(2, 3))
    return [node for node in region.graph.nodes if node.op == "call_function"][-1]


def pattern(name, tree, **options):
    options = {"anchor": "root", "numerics": "exact", "refusal": lambda match: None, "build": None, **options}
    return Pattern(name=name, tree=tree, **options)


def names(findings):
    return [match.pattern.name for match in findings.matches]


SUM = Op(aten.add.Tensor, Var("x"), Op(aten.tanh.default, Var("y")), name="root")


def test_addition_matches_in_either_order():
    for function in (lambda x: x + torch.tanh(x), lambda x: torch.tanh(x) + x):
        (found,) = list(unify(SUM, last_call(function)))[:1]
        assert found.captures["x"] is found.captures["y"]


def test_an_argument_that_is_not_its_default_does_not_match():
    assert not list(unify(SUM, last_call(lambda x: torch.add(x, torch.tanh(x), alpha=2))))


def test_the_same_name_is_the_same_value():
    square = Op(aten.mul.Tensor, Var("x"), Var("x"))
    assert list(unify(square, last_call(lambda x: x * x)))
    assert not list(unify(square, last_call(lambda x: x * x.sin())))


def test_the_same_name_is_the_same_call():
    tanh = Op(aten.tanh.default, Var("x"), name="tanh")
    tree = Op(aten.add.Tensor, tanh, Op(aten.mul.Tensor, tanh, tanh))

    def function(x):
        hidden = torch.tanh(x)
        return hidden + hidden * hidden

    (found,) = list(unify(tree, last_call(function)))[:1]
    assert [node.target for node in found.nodes] == [aten.add.Tensor, aten.tanh.default, aten.mul.Tensor]
    assert not list(unify(tree, last_call(lambda x: torch.tanh(x) + torch.tanh(x) * torch.tanh(x))))


def test_items_of_what_a_call_returns():
    half = Op(operator.getitem, Op(aten.chunk.default, Var("x"), 2, -1), 1)
    assert list(unify(half, last_call(lambda x: torch.cat([x, x], -1).chunk(2, -1)[1])))
    assert not list(unify(half, last_call(lambda x: torch.cat([x, x], -1).chunk(2, -1)[0])))


def test_numbers_are_compared_closely_but_not_exactly():
    tree = Op(aten.mul.Tensor, Var("x"), Number(0.7978845608028654))
    assert list(unify(tree, last_call(lambda x: x * 0.79788456)))
    assert not list(unify(tree, last_call(lambda x: x * 0.7979)))


def test_either_takes_the_first_option_that_fits():
    tree = Either(Op(aten.sin.default, Var("x")), Op(aten.cos.default, Var("x")))
    assert list(unify(tree, last_call(torch.cos))) and not list(unify(tree, last_call(torch.tan)))


def test_a_pattern_may_end_in_one_of_several_calls():
    tanh = Op(aten.tanh.default, Var("x"), name="root")
    either = pattern("either", Either(Op(aten.relu.default, tanh), Either(Op(aten.sin.default, tanh), tanh)))
    for function in (torch.relu, torch.sin, torch.cos):
        graph = region_of(Function(lambda x, f=function: f(torch.tanh(x))), torch.randn(2, 3)).graph
        (match,) = find(graph, (either,)).matches
        assert len(match.nodes) == (1 if function is torch.cos else 2)


def test_a_site_is_near_only_where_its_anchor_fits():
    square = Op(aten.pow.Tensor_Scalar, Var("x"), Number(2), name="root")
    chain = pattern("chain", Op(aten.relu.default, square))
    for exponent, near in ((2, ["chain"]), (3, [])):
        graph = region_of(Function(lambda x, n=exponent: torch.tanh(x**n)), torch.randn(2, 3)).graph
        assert [miss.pattern for miss in find(graph, (chain,)).near_misses] == near


def test_the_larger_match_wins():
    inner = pattern("inner", Op(aten.tanh.default, Var("x"), name="root"))
    outer = pattern("outer", Op(aten.relu.default, Op(aten.tanh.default, Var("x"), name="root")))
    graph = region_of(Function(lambda x: torch.relu(torch.tanh(x))), torch.randn(2, 3)).graph
    assert names(find(graph, (inner, outer))) == ["outer"]


def test_a_smaller_match_remains_where_the_larger_is_refused():
    inner = pattern("inner", Op(aten.tanh.default, Var("x"), name="root"))
    outer = pattern(
        "outer", Op(aten.relu.default, Op(aten.tanh.default, Var("x"), name="root")), refusal=lambda match: "not today"
    )
    graph = region_of(Function(lambda x: torch.relu(torch.tanh(x))), torch.randn(2, 3)).graph
    assert names(find(graph, (inner, outer))) == ["inner"]


SINES = pattern("sines", Op(aten.sin.default, Var("x"), name="root"), siblings="x")


def test_siblings_that_read_one_value_are_one_match():
    def function(x):
        y = x * 2
        return x.sin() + x.sin() + y.sin() + y.sin().cos() + y.sin() + (x + y).sin()

    (first, second) = find(region_of(Function(function), torch.randn(2, 3)).graph, (SINES,)).matches
    assert [len(match.members) for match in (first, second)] == [2, 3]
    assert first.nodes == tuple(member.root for member in first.members) and first.root is first.nodes[0]


def test_siblings_leave_out_what_other_matches_cover():
    outer = pattern("outer", Op(aten.relu.default, Op(aten.sin.default, Var("x"), name="root")))
    single = pattern("single", Op(aten.sin.default, Var("x"), name="root"))

    def function(x):
        return torch.relu(x.sin()) + x.sin() + x.sin()

    graph = region_of(Function(function), torch.randn(2, 3)).graph
    assert names(find(graph, (single, SINES, outer))) == ["outer", "sines"]
    graph = region_of(Function(lambda x: torch.relu(x.sin()) + x.sin()), torch.randn(2, 3)).graph
    assert names(find(graph, (single, SINES, outer))) == ["outer", "single"]


def test_refused_siblings_are_near_misses():
    def refusal(match):
        return "not into a cosine" if any(user.target is aten.cos.default for user in match.root.users) else None

    refusing = pattern("sines", Op(aten.sin.default, Var("x"), name="root"), siblings="x", refusal=refusal)
    findings = find(region_of(Function(lambda x: x.sin() + x.sin().cos()), torch.randn(2, 3)).graph, (refusing,))
    assert not findings.matches and findings.near_misses[0].reason == "not into a cosine"
    findings = find(region_of(Function(lambda x: x.sin().cos()), torch.randn(2, 3)).graph, (refusing,))
    assert "not into a cosine" not in [miss.reason for miss in findings.near_misses]


CHAIN = pattern("chain", Op(aten.relu.default, Op(aten.tanh.default, Var("x"), name="root")))


def refusal_of(function):
    findings = find(region_of(Function(function), torch.randn(2, 3)).graph, (CHAIN,))
    assert not findings.matches
    return findings.near_misses[0].reason


def test_an_inner_value_with_another_user():
    def function(x):
        hidden = torch.tanh(x)
        return torch.relu(hidden) * hidden

    assert "also used by aten.mul" in refusal_of(function)


def test_an_inner_value_that_is_an_output():
    def function(x):
        hidden = torch.tanh(x)
        return torch.relu(hidden), hidden

    assert "the model's output" in refusal_of(function)


def test_storage_written_in_place():
    def function(x):
        doubled = x * 2
        row = doubled[0]
        result = torch.relu(torch.tanh(doubled))
        row.mul_(2)
        return result + doubled

    assert "written in place" in refusal_of(function)


def test_an_input_that_is_an_inner_value():
    twice = pattern("twice", Op(aten.add.Tensor, Op(aten.tanh.default, Var("x"), name="root"), Var("y")))

    def function(x):
        hidden = torch.tanh(x)
        return hidden + hidden

    findings = find(region_of(Function(function), torch.randn(2, 3)).graph, (twice,))
    assert not findings.matches and "used twice" in findings.near_misses[0].reason


def test_a_site_is_the_module_of_its_anchor():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2))
    findings = find(region_of(model, torch.randn(2, 3)).graph, REGISTRY)
    assert [(m.pattern.name, m.site) for m in findings.matches] == [("linear_relu", "0.0"), ("linear", "1")]
    assert all(isinstance(match, Match) for match in findings.matches)


def test_operators_that_every_match_calls():
    x, relu = Var("x"), Op(aten.relu.default, Var("x"))
    assert required(Either(relu, Op(aten.add.Tensor, relu, x))) == {aten.relu.default}
    assert required(Op(aten.cat.default, [relu, Either(x, relu)])) == {aten.cat.default, aten.relu.default}
    assert required(Together(relu, Op(aten.neg.default, x))) == {aten.relu.default, aten.neg.default}
    assert required(Either(x, relu)) == required(x) == frozenset()
