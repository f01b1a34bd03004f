"""Imports between the rooms of the package run one way, and by their front doors."""

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kfconvert"
# Each room may import those below it; those that stand in one line do not import each other. The ground is for all.
FLOORS = """
cli
converter
artifact
pipelines validator zoo
conversion
own_patterns generation
capture
patterns
matching modules training
canonical runtime ops profiling report
region accuracy
graph inputs
"""
GROUND = {
    "extension",
    "fallbacks",
    "folders",
    "json_values",
    "process",
    "settings",
    "torch_state",
    "version",
    "known_libraries",
    "wrapped_tensors",
}


def room(path):
    """The room of a file: its folder, or the file itself where it stands at the top."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def imports(path):
    """(line, absolute name of what is imported, name in it) of every import of this package, in functions as well."""
    return list(_imports(path))


def _imports(path):
    package = ["kfconvert", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module.split(".")[0] == "kfconvert":
                yield from ((node.lineno, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names if alias.name.startswith("kfconvert."))


def target(module, name):
    """(room, whether it is imported by its front door) of what is imported."""
    parts = module.split(".")[1:]
    folder = PACKAGE.joinpath(*parts)
    if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists():
        parts.append(name)
    return parts[0] if parts else "", len(parts) == 1


def arrows():
    """(room, room that it imports, by its front door, place) of every import from one room to another."""
    for path in sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"}):
        for line, module, name in imports(path):
            found, by_the_door = target(module, name)
            if found not in ("", room(path), "_C"):
                yield room(path), found, by_the_door, f"{path.relative_to(PACKAGE)}:{line} imports {module}.{name}"


def is_allowed(above, below):
    floors = {name: number for number, line in enumerate(FLOORS.split("\n")) for name in line.split()}
    if below in GROUND:
        return above not in GROUND
    return above in floors and below in floors and floors[above] < floors[below]


def test_rooms_of_the_runtime_import_one_way():
    floors = ["dispatch", "recording", "state"]
    wrong = []
    for path in sorted((PACKAGE / "runtime").glob("*/*.py")):
        for line, module, _ in imports(path):
            parts = module.split(".")
            below = parts[2] if parts[:2] == ["kfconvert", "runtime"] and len(parts) > 2 else path.parent.name
            if floors.index(below) < floors.index(path.parent.name):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
    assert wrong == []


# Other arrows: faces and tables of names, and rooms apart from the way of a model.
OTHERS = {
    ("__main__", "cli"), ("auto_convert", "second_names"), ("explain", "report"), ("kernels", "extension"),
    ("kernels", "ops"), ("kernels", "second_names"), ("modules", "kernels"), ("ops", "second_names"),
    ("jit", "settings"),
}  # fmt: skip
# The public operators check the kinds of their arguments; these call the unchecked ones, and their definitions.
INSIDE = {("kernels", "ops"), ("modules", "ops"), ("training", "ops")}


def test_imports_run_one_way():
    found = arrows()
    assert not [p for above, below, _, p in found if not (is_allowed(above, below) or (above, below) in OTHERS)]


def test_no_files_import_each_other_in_a_circle():
    """With the imports in functions and those for type checkers. Each round removes the files that import none of the
    rest."""
    rest = {}
    for path in PACKAGE.rglob("*.py"):
        rest[path] = {file for _, module, name in imports(path) if (file := file_of(module, name)) not in (path, None)}
    del rest[PACKAGE / "__init__.py"]  # names of all rooms, on first use
    while free := [path for path, below in rest.items() if rest.keys().isdisjoint(below)]:
        for path in free:
            del rest[path]
    assert not rest


def file_of(module, name):
    """The file that an import of ``name`` from ``module`` runs last."""
    folder = PACKAGE.parent.joinpath(*module.split("."))
    files = folder / f"{name}.py", folder / name / "__init__.py", folder / "__init__.py", folder.with_suffix(".py")
    return next(filter(Path.exists, files), None)


def test_rooms_are_entered_by_their_doors():
    assert not [place for above, below, door, place in arrows() if not door and (above, below) not in INSIDE]


def test_no_arrow_is_allowed_in_vain():
    found = {(above, below) for above, below, *_ in arrows()}
    assert found >= OTHERS
    assert {below for _, below in found} >= GROUND


def test_every_room_says_what_it_is_for():
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_faces_of_rooms_have_no_name_that_nobody_imports():
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    used = {(module, name) for path in PACKAGE.rglob("*.py") for _, module, name in imports(path)}
    unused = []
    for face in PACKAGE.glob("*/__init__.py"):
        name, (_, *body) = face.parent.name, ast.parse(face.read_text()).body
        if all(isinstance(node, ast.ImportFrom) for node in body):  # others list the names for users in __all__
            names = [alias.name for node in body for alias in node.names]
            unused += [
                f"{name}.{n}" for n in names if (f"kfconvert.{name}", n) not in used and f"{name}.{n}" not in text
            ]
    assert unused == []
