"""A tree of a model's modules that shows what was fused, what was not, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.text import Text
from rich.tree import Tree
from torch import nn

from ..graph import at
from .words import plain_text, reason_kind

NAMES_IN_FULL = 4  # names shown for modules with equal findings
_WORTH_TELLING = 0.01  # smallest share of a forward's time that is shown
_WIDTH = 100_000  # columns of str(): the reader wraps whole lines
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_FUSED, _REJECTED, _MISSED, _CAPTURED, _NOT_CAPTURED = "green", "yellow", "", "dim", "bold yellow"


class Explanation:
    """The findings of a conversion, module by module. ``str()`` returns plain text, and rich prints it in colors.

    Modules without a finding are omitted, and neighbors with equal findings share a line.

    Args:
        stats: ``conversion_stats`` of a ModelConverter, or ``kfconvert_info()`` of a converted or loaded model.
        classes: the class name of each module by its path, see ``module_classes``; shown where known.
    """

    def __init__(self, stats: dict[str, Any], classes: dict[str, str] | None = None):
        self._stats, self._classes = stats, classes or {}
        self._shares: dict[str, float] = (stats.get("time_shares") or {}).get("modules", {})
        self._order = {path: index for index, path in enumerate(self._classes)}

    def __rich__(self) -> Tree:
        root = _Module("")
        _add_regions(root, self._stats.get("regions", []))
        for site in self._stats.get("sites", []):
            root.below(site["module"]).add(_site(site, "fused" if self._is_timed() else "fits"))
        for miss in self._stats.get("near_misses", []):
            text = f"nearest {miss['pattern']}: {miss['reason']}{at(miss.get('location'))}"
            root.below(miss["module"]).add(_Finding(text, _MISSED))
        for each in self._stats.get("unmatched_activations", []):
            after = f" after {each['source']}" if each["source"] else ""
            text = f"no pattern takes {each['operator']}{after}{at(each.get('location'))}"
            root.below(each["module"]).add(_Finding(text, _MISSED))
        tree = Tree(self._headline())
        if self._shares:
            tree.add(Text(self._time_line()))
        _grow(tree, [_Row("", "", root.findings, [])] if root.findings else [])
        _grow(tree, [row for child in self._ordered(root) for row in self._rows(child)])
        hidden = [path for path in self._classes if path and not root.holds(path)]
        if hidden:
            longest = self._longest(hidden)
            tree.add(Text(f"modules without a site: {len(hidden)}{longest}", style="dim"))
        return tree

    def __str__(self) -> str:
        return plain_text(self, _WIDTH)

    def _headline(self) -> Text:
        stats = self._stats
        line = Text(stats.get("model", ""), style="bold")
        line.append(f"  {stats.get('inputs', '')}", style="dim")
        what = "fused" if self._is_timed() else "fit"
        line.append(f"  {stats.get('total_replaced', 0)} of {stats.get('total_found', 0)} sites {what}")
        if not stats.get("total_replaced") and stats.get("nothing_fused"):
            line.append(f": {stats['nothing_fused']}", style=_REJECTED)
        return line

    def _time_line(self) -> str:
        """The time of the original's forward, and the fused share of it."""
        shares = self._stats["time_shares"]
        where = "is fused" if self._is_timed() else "is in sites that can be fused"
        return f"of {shares['milliseconds']:.2f} ms of the original's forward, {_percent(shares['fused'])} {where}"

    def _longest(self, hidden: list[str]) -> str:
        inner = {path.rpartition(".")[0] for path in self._classes}
        leaves = [path for path in hidden if path not in inner and self._shares.get(path, 0.0) >= _WORTH_TELLING]
        leaves.sort(key=self._shares.__getitem__, reverse=True)
        told = [f"{path} {self._classes[path]} {_percent(self._shares[path])}" for path in leaves[:NAMES_IN_FULL]]
        return f"; slowest: {', '.join(told)}" if told else ""

    def _is_timed(self) -> bool:
        """Whether applied sites were timed, and not only checked for accuracy."""
        return (self._stats.get("config") or {}).get("select") != "all"

    def _rows(self, module: _Module, name: str | None = None) -> list[_Row]:
        """The lines for ``module`` and its children; a module that adds nothing is replaced by its children's lines."""
        name = module.path if name is None else name
        if module.is_passage() or module.is_list_of_blocks():
            return [row for inner in self._ordered(module) for row in self._rows(inner, f"{name}.{inner.name}")]
        rows = [row for inner in self._ordered(module) for row in self._rows(inner, inner.name)]
        share = self._shares.get(module.path)
        return [_Row(name, self._classes.get(module.path, ""), module.findings, rows, module.path, share)]

    def _ordered(self, module: _Module) -> list[_Module]:
        """The children in the model's order, where it is known."""
        return sorted(module.children.values(), key=lambda child: self._order.get(child.path, len(self._order)))


def module_classes(model: nn.Module) -> dict[str, str]:
    """Returns the class name of every module of ``model`` by its dotted path; "" is the model itself."""
    return {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}


@dataclass
class _Finding:
    """A statement about a module. Findings that differ only in numbers have the same ``kind``."""

    text: str
    style: str
    kind: str | None = None
    times: int = 1

    def told(self) -> Text:
        return Text(self.text + (f" ({self.times} times)" if self.times > 1 else ""), style=self.style)

    def signature(self, base: str) -> tuple[Any, ...]:
        """A key that is equal for equal findings in different modules; ``base`` is the path of the compared module."""
        text = self.kind or self.text
        if base:
            text = re.sub(rf"(?<![\w.]){re.escape(base)}(?!\w)", "", text)
        return _DOTTED.sub(lambda path: re.sub(r"\.\d+\b", ".#", path[0]), text), self.style, self.times


@dataclass
class _Module:
    path: str
    findings: list[_Finding] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def is_passage(self) -> bool:
        """Whether the module has a single child and no finding."""
        return not self.findings and len(self.children) == 1

    def branches(self) -> bool:
        return any(child.branches() for child in self.children.values()) if self.is_passage() else bool(self.children)

    def is_list_of_blocks(self) -> bool:
        """Whether the module is only a list of modules with findings below them, such as the layers of a network."""
        children = self.children.values()
        return not self.findings and bool(children) and all(c.name.isdigit() and c.branches() for c in children)

    def below(self, path: str) -> _Module:
        """Returns the module at ``path`` below this one, and creates it if missing."""
        found = self
        for name in path.split(".") if path else ():
            found = found.children.setdefault(name, _Module(f"{found.path}.{name}".lstrip(".")))
        return found

    def holds(self, path: str) -> bool:
        """Whether the module at ``path``, or one below it, has a finding."""
        found: _Module | None = self
        for name in path.split("."):
            found = found.children.get(name) if found else None
        return found is not None

    def add(self, finding: _Finding) -> None:
        for there in self.findings:
            if there.signature("") == finding.signature(""):
                there.times += 1
                return
        self.findings.append(finding)


@dataclass
class _Row:
    name: str
    class_name: str
    findings: list[_Finding]
    rows: list[_Row]
    path: str = ""
    share: float | None = None  # of a forward's time

    def signature(self, base: str) -> tuple[Any, ...]:
        findings = tuple(finding.signature(base) for finding in self.findings)
        return self.class_name, findings, tuple((row.name, row.signature(base)) for row in self.rows)


def _site(site: dict[str, Any], applied: str) -> _Finding:
    """The finding for ``site``; ``applied`` is the word for a fused one."""
    if site["status"] == "applied":
        return _Finding(f"{site['pattern']}: {applied} ({site['strategy']})", _FUSED)
    reason = site["reason"] or "no reason given"
    # The numbers in a reason such as "not faster: kernel takes 11.5 us, ..." differ from site to site.
    return _Finding(f"{site['pattern']}: not fused, {reason}", _REJECTED, f"{site['pattern']}: {reason_kind(reason)}")


def _add_regions(root: _Module, regions: list[dict[str, Any]]) -> None:
    """Adds to each module the call forms that were captured, and those that were not, with the reason."""
    forms: dict[tuple[str, str | None], list[str]] = {}
    for region in regions:
        path, why = region.get("module") or "", None
        if not region["captured"]:
            why = f"{region['reason']}{at(region.get('location'))}"
        form = region["name"] or ""
        forms.setdefault((path, why), []).append("" if form == path else form)
    for (path, why), names in forms.items():
        called = "; ".join(filter(None, dict.fromkeys(names)))
        text = "captured" if why is None else "not captured"
        text += f" as called with {called}" if called else ""
        style = _CAPTURED if why is None else _NOT_CAPTURED
        root.below(path).add(_Finding(text if why is None else f"{text}: {why}", style))


def _grow(tree: Tree, rows: list[_Row]) -> None:
    for _, neighbours in groupby(rows, key=lambda row: row.signature(row.path)):
        alike = list(neighbours)
        row = alike[0]
        label = Text(", ".join(each.name for each in alike) if len(alike) <= NAMES_IN_FULL else "")
        if len(alike) > NAMES_IN_FULL:
            label.append(f"{row.name} ... {alike[-1].name}")
        if len(alike) > 1:
            label.append(f" ({len(alike)} alike)")
        if row.class_name:
            label.append(f"  {row.class_name}", style="dim")
        findings = row.findings
        if len(findings) == 1 and row.name:
            label.append("  ").append_text(findings[0].told())
            findings = []
        shares = [each.share for each in alike if each.share is not None]
        if shares:
            label.append(f"  {_percent(sum(shares))} of the time", style="dim")
        branch = tree.add(label) if row.name else tree
        for finding in findings:
            branch.add(finding.told())
        _grow(branch, row.rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
