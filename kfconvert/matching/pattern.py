"""Types for fusions, their matches, and near misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Either, Op, Together, is_of_module, module_path, parts, required


@dataclass(frozen=True)
class Replacement:
    """The replacement of a match: ``module(*inputs)``.

    ``bindings`` names the attributes of the module that refer to a live tensor of the model: (holder, attribute,
    placeholder of the graph). ``outputs`` are the nodes of the values that the module returns, in order.
    """

    module: nn.Module
    inputs: tuple[fx.Node, ...]
    bindings: tuple[tuple[nn.Module, str, fx.Node], ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Case:
    """A small module that tests a pattern: it must match ``count`` times, or never because of ``reason``."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    count: int = 1
    reason: str | None = None


@dataclass(frozen=True)
class Pattern:
    """A fusion.

    Attributes:
        name: key in ``conversion_stats`` (``<name>_found``, ``<name>_replaced``).
        tree: the dataflow to find: a call, or alternatives.
        anchor: capture name of the call that identifies a site (its module is the site's module).
        refusal: returns the reason why a match must not be fused, or None.
        build: creates the fused module; ``tensor`` returns the live tensor of a placeholder.
        numerics: "exact", "reassociated" (same formula, other rounding) or "approximate" (opt-in).
        kept: capture names of inner values that may have other users, because the fused module returns them too.
        siblings: name of a capture, or None. If set, a match consists of all occurrences of the tree (two or more)
            that capture the same value under this name, listed in ``Match.members``. Occurrences covered by another
            match of several calls do not take part.
        source: the user's source of a registered pattern; None for those of ``patterns``.
        tolerance: relative error against float64 that passes at its sites, regardless of the original's error.
        cases: modules that must match, and near misses that must not.
    """

    name: str
    tree: Op | Either | Together
    anchor: str
    refusal: Callable[[Match], str | None]
    build: Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]
    numerics: str = "reassociated"
    kept: frozenset[str] = frozenset()
    siblings: str | None = None
    cases: tuple[Case, ...] = ()
    source: Any = None
    tolerance: float = 0.0

    @cached_property
    def calls(self) -> list[Op]:
        """The distinct calls in the tree, outer calls first."""
        return [part for part in parts(self.tree) if isinstance(part, Op)]

    @cached_property
    def required(self) -> frozenset[Any]:
        """Operators that every match calls."""
        return required(self.tree)


@dataclass(frozen=True)
class Match:
    """A place where a pattern applies. ``nodes`` are the calls it covers, root first.

    A match of siblings has the captures of the first of its ``members``, which are in graph order.
    """

    pattern: Pattern
    nodes: tuple[fx.Node, ...]
    captures: dict[str, Any]
    members: tuple[Match, ...] = ()

    @property
    def root(self) -> fx.Node:
        return self.nodes[0]

    @property
    def modules(self) -> list[str]:
        """Returns the known dotted paths of the modules whose forwards contain its calls."""
        return list(dict.fromkeys(module_path(node) for node in self.nodes if is_of_module(node)))

    @property
    def site(self) -> str:
        """Returns the dotted path of the module with the anchor."""
        return module_path(self.captures[self.pattern.anchor])

    def is_kept(self, name: str) -> bool:
        """Whether the inner value ``name`` has users outside of the match."""
        return any(user not in self.nodes for user in self.captures[name].users)


@dataclass(frozen=True)
class NearMiss:
    """A site where a pattern almost matched, and the reason why it did not.

    ``location`` is ``file:line`` of the call that prevented the match, or of the anchor if there is no such call; None
    if the graph does not have it.
    """

    pattern: str
    site: str
    reason: str
    location: str | None = None


@dataclass(frozen=True)
class UnmatchedActivation:
    """An activation without a match: its ``operator``, the operator that computes its input (None for an input of the
    model), the module whose forward contains it, and ``file:line`` if known."""

    operator: str
    source: str | None
    site: str
    location: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """A fusible match that the user excluded, and the reason."""

    match: Match
    reason: str


@dataclass
class Findings:
    """The results of matching: matches without overlaps, in graph order; near misses; excluded matches, which may
    overlap with others; and activations without a match."""

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    activations: list[UnmatchedActivation] = field(default_factory=list)
