"""Selection of the sites to fuse, by names of patterns and by modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from ..capture import Capture, Part
from ..matching import Match
from ..patterns import every_pattern, search
from .captures import Captures
from .checks import ConversionError, first_line
from .config import ConversionConfig, near

# The maximum number of an option's names in the reason of an excluded site.
NAMES_SHOWN = 4
# The prefix of an entry of ``modules`` that excludes a module.
NOT = "!"
# Called with a module and its dotted path in the model; returns whether its own computation may be fused.
FilterFn = Callable[[nn.Module, str], bool]


def check_names(config: ConversionConfig) -> None:
    """Raises ConversionError if a name in ``include`` or ``exclude`` matches no known pattern."""
    known = [pattern.name for pattern in every_pattern()]
    for option, names in (("include", config.include or ()), ("exclude", config.exclude)):
        for name in names:
            if not any(fnmatchcase(each, name) for each in known):
                others = f"; the patterns are {', '.join(known)}; select modules with modules= or filter_fn="
                raise ConversionError(f"{option}: no pattern is called {name!r}{near(name, known) or others}")


def with_chosen(config: ConversionConfig, model: nn.Module, filter_fn: FilterFn | None) -> ConversionConfig:
    """Returns ``config`` for this ``model``, with the selection of ``filter_fn``, which is called once for each module.

    Raises:
        ConversionError: ``filter_fn`` fails, or an entry of ``modules`` matches no module.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for entry in config.modules or ():
        name = entry.removeprefix(NOT)
        if not any(_is_in(path, name) for path in paths):
            raise ConversionError(f"modules: {type(model).__name__} has no module {name!r}{near(_stem(name), paths)}")
    if filter_fn is None:
        return config
    chosen = []
    for path, module in model.named_modules():
        try:
            if filter_fn(module, path):
                chosen.append(path)
        except Exception as error:
            what = f"filter_fn({type(module).__name__}, {path!r})"
            raise ConversionError(f"{what} raised {type(error).__name__}: {first_line(error)}") from error
    return config.changed(chosen_modules=chosen)


def controlled(captures: Captures, config: ConversionConfig, model: nn.Module) -> Captures:
    """Returns ``captures`` with only the matches that ``config`` selects. Parts of one structure are split if their
    selections differ."""
    if config.include is None and not config.exclude and config.modules is None and config.chosen_modules is None:
        return captures
    control = _Control(config, model)
    for captured in captures.every():
        refusal = partial(control.refusal, captured.path)
        captured.findings = search(captured.region.graph, refusal)
    return replace(captures, parts=tuple(each for part in captures.parts for each in _alike(part)))


def _alike(part: Part) -> list[Part]:
    """Groups the captures of a part by equal matches; each group shares one graph."""
    groups: dict[tuple, list[Capture]] = {}
    for captured in part.captures:
        matches = tuple((match.pattern.name, match.nodes) for match in captured.findings.matches)
        groups.setdefault(matches, []).append(captured)
    return [Part(captures) for captures in groups.values()]


class _Control:
    def __init__(self, config: ConversionConfig, model: nn.Module):
        self._config = config
        self._chosen = None if config.chosen_modules is None else frozenset(config.chosen_modules)
        names: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(path)
        # Maps each path of a module to all of its paths: a graph has only the path of the call.
        self._paths = {path: paths for paths in names.values() for path in paths}

    def refusal(self, region: str, match: Match) -> str | None:
        """Returns why a match in the graph of the module ``region`` is excluded; None if it is selected."""
        config, name = self._config, match.pattern.name
        if config.include is not None and not any(fnmatchcase(name, entry) for entry in config.include):
            return f"excluded by include={_listed(config.include)}"
        for entry in config.exclude:
            if fnmatchcase(name, entry):
                return f"excluded by exclude={_listed([entry])}"
        covered = [".".join(filter(None, (region, path))) for path in match.modules] or [region]
        for path in covered:
            paths = self._paths.get(path, [path])
            if config.modules is not None and not _is_wanted(paths, config.modules):
                return f"excluded by modules={_listed(config.modules)}: it covers {path or 'the model itself'}"
            if self._chosen is not None and self._chosen.isdisjoint(paths):
                return f"excluded by filter_fn: it covers {path or 'the model itself'}"
        return None


def _listed(names: Sequence[str]) -> str:
    """Formats a list of names as code; a long list is truncated."""
    return f"[{', '.join(map(repr, names[:NAMES_SHOWN]))}{', ...' if len(names) > NAMES_SHOWN else ''}]"


def _is_wanted(paths: Sequence[str], entries: Sequence[str]) -> bool:
    """Whether ``entries`` select a module with these ``paths``. If all entries are exclusions, they select every other
    module."""
    unwanted = [entry.removeprefix(NOT) for entry in entries if entry.startswith(NOT)]
    wanted = [entry for entry in entries if not entry.startswith(NOT)] or (["*"] if unwanted else [])
    return _is_in_any(paths, wanted) and not _is_in_any(paths, unwanted)


def _is_in_any(paths: Iterable[str], entries: Iterable[str]) -> bool:
    return any(_is_in(path, entry) for path in paths for entry in entries)


def _is_in(path: str, entry: str) -> bool:
    """Whether ``entry`` matches the module ``path`` or a module that contains it."""
    steps = path.split(".")
    return any(fnmatchcase(".".join(steps[:count]), _stem(entry)) for count in range(len(steps) + 1))


def _stem(entry: str) -> str:
    """Strips a trailing ``.*`` from ``entry``, which matches submodules in any case."""
    return entry.removesuffix(".*")
