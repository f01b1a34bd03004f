"""What a fusion is, where one applies, and where one almost did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Either, Op, Together, is_of_module, module_path


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a match: ``module(*inputs)``.

    ``bindings`` names the attributes of the module that hold a live tensor of the model: (holder, attribute,
    placeholder of the graph). ``outputs`` are the nodes of the values that the module returns, in its order.
    """

    module: nn.Module
    inputs: tuple[fx.Node, ...]
    bindings: tuple[tuple[nn.Module, str, fx.Node], ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Case:
    """A small module for which a pattern is tested: it must match ``count`` times, or not at all for ``reason``."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    count: int = 1
    reason: str | None = None


@dataclass(frozen=True)
class Pattern:
    """One fusion.

    Attributes:
        name: key in ``conversion_stats`` (``<name>_found``, ``<name>_replaced``).
        tree: the dataflow to find: a call, or one of several.
        anchor: capture name of the call that identifies a site (its module is the site's module).
        numerics: "exact", "reassociated" (same formula, other rounding) or "approximate" (opt-in).
        refusal: None where the match may be fused, else the reason why not.
        build: makes the fused module; ``tensor`` gives the live tensor behind a placeholder.
        kept: capture names of inner values that may have other users, because the fused module returns them too.
        siblings: name of a capture, or None. Where it is given a match is not one occurrence of the tree but all
            those, two or more, that capture the same value under this name; each is in ``Match.members``. Only
            occurrences that no other match of several calls covers take part.
        source: what it was made of, where it is a user's own; None for those of ``patterns``.
        tolerance: relative error against float64 that passes at its sites, whatever that of the original is.
        cases: modules that must match and near misses that must not.
    """

    name: str
    tree: Op | Either | Together
    anchor: str
    numerics: str
    refusal: Callable[[Match], str | None]
    build: Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]
    kept: frozenset[str] = frozenset()
    siblings: str | None = None
    cases: tuple[Case, ...] = ()
    source: Any = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Match:
    """A place where a pattern applies. ``nodes`` are the calls it covers, root first.

    A match of siblings has the captures of the first of its ``members``, which stand in graph order.
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
        """Dotted paths of the modules in whose forwards its calls are, as far as they are known."""
        return list(dict.fromkeys(module_path(node) for node in self.nodes if is_of_module(node)))

    @property
    def site(self) -> str:
        """Dotted path of the module that holds the anchor."""
        return module_path(self.captures[self.pattern.anchor])

    def is_kept(self, name: str) -> bool:
        """Whether the inner value ``name`` has users outside of the match."""
        return any(user not in self.nodes for user in self.captures[name].users)


@dataclass(frozen=True)
class NearMiss:
    """A site where a pattern almost applied, and what stood in the way.

    ``location`` is ``file:line`` of the call that stood in the way, or of the anchor where there is no such call;
    None where the graph does not know it.
    """

    pattern: str
    site: str
    reason: str
    location: str | None = None


@dataclass(frozen=True)
class UnmatchedActivation:
    """An activation that no pattern has taken: its ``operator``, the one that makes its input (None for an input of the
    model), the module in whose forward it is, and ``file:line`` where that is known."""

    operator: str
    source: str | None
    site: str
    location: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """A match that may be fused and is not wanted, and why not."""

    match: Match
    reason: str


@dataclass
class Findings:
    """Matches that do not overlap, in graph order; where nothing, or nothing so large, could be fused; the matches that
    were left out, which may overlap with the others; and the activations in none of all these matches."""

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    activations: list[UnmatchedActivation] = field(default_factory=list)
