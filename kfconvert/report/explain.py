"""Where in a model something was fused, where not, and what stood in the way: a tree of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from rich.tree import Tree
from torch import nn

from ..graph import at
from .words import plain_text

NAMES_IN_FULL = 4  # of modules that are alike
_WORTH_TELLING = 0.01  # share of the time of a forward
_WIDTH = 100_000  # text that is no terminal's: whoever reads it wraps whole lines
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_FUSED, _REJECTED, _MISSED, _CAPTURED, _NOT_CAPTURED = "green", "yellow", "", "dim", "bold yellow"


class Explanation:
    """The findings of a conversion, module by module; ``str()`` gives text, and rich prints it in colours.

    Modules that hold no finding are left out, and neighbours whose findings are the same share a line.

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
            tree.add(Text(f"modules without a site of their own: {len(hidden)}{longest}", style="dim"))
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
        """How long a forward of the original takes, and how much of that is fused."""
        shares = self._stats["time_shares"]
        where = "is fused" if self._is_timed() else "is in what fits"
        return f"of {shares['milliseconds']:.2f} ms of the original's forward, {_percent(shares['fused'])} {where}"

    def _longest(self, hidden: list[str]) -> str:
        """Those of the modules, of which none is told, that call no other and take the most time."""
        inner = {path.rpartition(".")[0] for path in self._classes}
        leaves = [path for path in hidden if path not in inner and self._shares.get(path, 0.0) >= _WORTH_TELLING]
        leaves.sort(key=self._shares.__getitem__, reverse=True)
        told = [f"{path} {self._classes[path]} {_percent(self._shares[path])}" for path in leaves[:NAMES_IN_FULL]]
        return f"; slowest: {', '.join(told)}" if told else ""

    def _is_timed(self) -> bool:
        """Whether what is applied was found to be faster, and not only to be accurate."""
        return (self._stats.get("config") or {}).get("select") != "all"

    def _rows(self, module: _Module, name: str | None = None) -> list[_Row]:
        """The lines for ``module``: one with what is below it, or those of its children where it adds nothing."""
        name = module.path if name is None else name
        if module.is_passage() or module.is_list_of_blocks():
            return [row for inner in self._ordered(module) for row in self._rows(inner, f"{name}.{inner.name}")]
        rows = [row for inner in self._ordered(module) for row in self._rows(inner, inner.name)]
        share = self._shares.get(module.path)
        return [_Row(name, self._classes.get(module.path, ""), module.findings, rows, module.path, share)]

    def _ordered(self, module: _Module) -> list[_Module]:
        """The children in the order in which the model holds them, where that is known."""
        return sorted(module.children.values(), key=lambda child: self._order.get(child.path, len(self._order)))


def module_classes(model: nn.Module) -> dict[str, str]:
    """The class name of every module of ``model`` by its dotted path; "" is the model itself."""
    return {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}


@dataclass
class _Finding:
    """One thing to tell of a module. ``kind``: what findings share that are the same but for their numbers."""

    text: str
    style: str
    kind: str | None = None
    times: int = 1

    def told(self) -> Text:
        return Text(self.text + (f" ({self.times} times)" if self.times > 1 else ""), style=self.style)

    def signature(self, base: str) -> tuple[Any, ...]:
        """Equal for findings that tell the same of modules alike; ``base`` is the path of the module compared."""
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
        """Whether there is nothing to tell of it but what is in its one child."""
        return not self.findings and len(self.children) == 1

    def branches(self) -> bool:
        return any(child.branches() for child in self.children.values()) if self.is_passage() else bool(self.children)

    def is_list_of_blocks(self) -> bool:
        """Whether it only numbers modules that have something below them, such as the layers of a network."""
        children = self.children.values()
        return not self.findings and bool(children) and all(c.name.isdigit() and c.branches() for c in children)

    def below(self, path: str) -> _Module:
        """The module ``path`` steps below this one, made where it is not there yet."""
        found = self
        for name in path.split(".") if path else ():
            found = found.children.setdefault(name, _Module(f"{found.path}.{name}".lstrip(".")))
        return found

    def holds(self, path: str) -> bool:
        """Whether ``path`` below this one has, or leads to, a finding."""
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
    share: float | None = None  # of the time of a forward

    def signature(self, base: str) -> tuple[Any, ...]:
        findings = tuple(finding.signature(base) for finding in self.findings)
        return self.class_name, findings, tuple((row.name, row.signature(base)) for row in self.rows)


def _site(site: dict[str, Any], applied: str) -> _Finding:
    """What to tell of ``site``; in the word ``applied`` where it is."""
    if site["status"] == "applied":
        return _Finding(f"{site['pattern']}: {applied} ({site['strategy']})", _FUSED)
    reason = site["reason"] or "no reason given"
    # Of a reason such as "not faster: kernel takes 11.5 us, ..." the figures differ from site to site.
    kind = re.sub(r"\d[\d.e+-]*", "#", f"{site['pattern']}: {reason.split(':')[0]}")
    return _Finding(f"{site['pattern']}: not fused, {reason}", _REJECTED, kind)


def _add_regions(root: _Module, regions: list[dict[str, Any]]) -> None:
    """Tell of each captured module in which call forms it was captured, and in which not and why."""
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
    for alike in _runs(rows):
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


def _runs(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Neighbours with the same findings, together."""
    run: list[_Row] = []
    for row in rows:
        if run and run[-1].signature(run[-1].path) != row.signature(row.path):
            yield run
            run = []
        run.append(row)
    if run:
        yield run
