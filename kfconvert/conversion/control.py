"""What the user wants fused, and what not: by the names of patterns and the modules that a site lies in."""

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
from .config import ConversionConfig, near
from .preparation import ConversionError, first_line

# So many names of an option are in the reason of each site that it leaves out.
NAMES_TOLD = 4
# Begins an entry of ``modules`` that says where nothing is fused.
NOT = "!"
# Called with a module and its dotted path in the model; whether what it computes may be fused.
FilterFn = Callable[[nn.Module, str], bool]


def check_names(config: ConversionConfig) -> None:
    """Raises ConversionError where a name in ``include`` or ``exclude`` fits no pattern that there is."""
    known = [pattern.name for pattern in every_pattern()]
    for option, names in (("include", config.include or ()), ("exclude", config.exclude)):
        for name in names:
            if not any(fnmatchcase(each, name) for each in known):
                others = f"; there are {', '.join(known)}; modules are chosen by modules= and filter_fn="
                raise ConversionError(f"{option}: no pattern is called {name!r}{near(name, known) or others}")


def with_chosen(config: ConversionConfig, model: nn.Module, filter_fn: FilterFn | None) -> ConversionConfig:
    """``config`` for this ``model``, with what ``filter_fn``, which is asked once for each of its modules, chooses.

    Raises:
        ConversionError: ``filter_fn`` fails, or an entry of ``modules`` fits no module.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for entry in config.modules or ():
        name = entry.removeprefix(NOT)
        if not any(_lies_in(path, name) for path in paths):
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
    """``captures`` with those findings only that ``config`` wants. Parts of one structure of which it wants different
    ones are no longer one part."""
    if config.include is None and not config.exclude and config.modules is None and config.chosen_modules is None:
        return captures
    control = _Control(config, model)
    for captured in captures.every():
        refusal = partial(control.refusal, captured.path)
        captured.findings = search(captured.region.graph, refusal)
    return replace(captures, parts=tuple(each for part in captures.parts for each in _alike(part)))


def _alike(part: Part) -> list[Part]:
    """The captures of a part in groups with the same matches, which are those of one graph."""
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
        # By each path of a module all of its paths: a graph knows it by the one that it was called by.
        self._paths = {path: paths for paths in names.values() for path in paths}

    def refusal(self, region: str, match: Match) -> str | None:
        """Why a match in the graph of the module ``region`` is left out; None where it is wanted."""
        config, name = self._config, match.pattern.name
        if config.include is not None and not any(fnmatchcase(name, entry) for entry in config.include):
            return f"excluded by include={_told(config.include)}"
        for entry in config.exclude:
            if fnmatchcase(name, entry):
                return f"excluded by exclude={_told([entry])}"
        covered = [".".join(filter(None, (region, path))) for path in match.modules] or [region]
        for path in covered:
            paths = self._paths.get(path, [path])
            if config.modules is not None and not _is_wanted(paths, config.modules):
                return f"excluded by modules={_told(config.modules)}: it covers {path or 'the model itself'}"
            if self._chosen is not None and self._chosen.isdisjoint(paths):
                return f"excluded by filter_fn: it covers {path or 'the model itself'}"
        return None


def _told(names: Sequence[str]) -> str:
    """A list of names as code, the first of many."""
    return f"[{', '.join(map(repr, names[:NAMES_TOLD]))}{', ...' if len(names) > NAMES_TOLD else ''}]"


def _is_wanted(paths: Sequence[str], entries: Sequence[str]) -> bool:
    """Whether a module that is called each of ``paths`` is among those that ``entries`` name: all, where these say but
    which are not."""
    wanted = [entry for entry in entries if not entry.startswith(NOT)]
    unwanted = [entry.removeprefix(NOT) for entry in entries if entry.startswith(NOT)]
    if unwanted and not wanted:
        return not _any_lies_in(paths, unwanted)
    return _any_lies_in(paths, wanted) and not _any_lies_in(paths, unwanted)


def _any_lies_in(paths: Iterable[str], entries: Iterable[str]) -> bool:
    return any(_lies_in(path, entry) for path in paths for entry in entries)


def _lies_in(path: str, entry: str) -> bool:
    """Whether the module ``path``, or one that it lies in, is called ``entry``."""
    steps = path.split(".")
    return any(fnmatchcase(".".join(steps[:count]), _stem(entry)) for count in range(len(steps) + 1))


def _stem(entry: str) -> str:
    """``entry`` without an ending that names what lies within: that is meant anyway."""
    return entry.removesuffix(".*")
