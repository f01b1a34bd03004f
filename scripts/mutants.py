"""Put faults into a copy of the package one by one, run the tests concerned, and print which go unnoticed.

    pip install -e ".[test,mutants]"
    PYTHONPATH=. python scripts/mutants.py                         # all of them: some 30 minutes on one core
    PYTHONPATH=. python scripts/mutants.py --only replay --count 0   # faults with this word in text, name or file

The faults of mutants_list.py are found by their text. ``--count`` more are drawn by cosmic-ray's operators (numbers,
comparisons, signs, conditions, loops) from the files that decide results, one from each file: those that come first in
an order by hashes of ``--seed``, the line and what it becomes, so that a fault stays drawn while other lines change.
Those that change no result are in mutants_list.py with the reason, and are listed, not run.

The tests concerned are the quick ones of the folder of the file with the fault (FIRST), the test files named like it
in that folder (for ops in that of modules, too), the general ones (GENERAL) and those that import it by name, the
shortest first, until one fails. A failure counts where the same test passes without the fault, and so does a run that
takes longer than ``--limit``, in which all tests concerned pass otherwise. The checkout is only read: each of
``--jobs`` works in a copy of its own in a temporary folder.

Exits with 1 where a fault survives, with 2 where one of the list is not in the package.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from mutants_list import EQUIVALENT, FAULTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kfconvert"
# Nothing is drawn from what prints, measures, finds models or builds.
LEFT_OUT = (
    "__main__.py", "cli/", "conversion/statistics.py", "csrc", "explain.py", "extension.py", "graph/sources.py", "jit",
    "kernels/triton", "profiling", "report/", "version.py", "zoo",
)  # fmt: skip
OPERATORS = re.compile(
    "ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_Gt|Gt_Lt|Is_IsNot|IsNot_Is)|"
    "ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Mul)|"
    "ReplaceUnaryOperator_(USub_UAdd|Delete_Not)|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|"
    "ReplaceOrWithAnd|NumberReplacer|ZeroIterationForLoop"
)
# Folder of the package, "" for all others -> tests that may notice any fault in it, within seconds.
FIRST = {
    "generation": ("capture/test_generation.py", "conversion/test_generate.py"),
    "inputs": ("artifact/test_stored_generation.py", "conversion/test_effort.py"),
    "conversion": (
        "conversion/test_effort.py",
        "capture/test_kinds_of_values.py",
        "patterns/test_own_patterns.py",
    ),
    "own_patterns": ("patterns/test_own_patterns.py", "patterns/test_own_numbers.py"),
    "graph": ("graph", "runtime/test_writes_by_layout.py", "matching/test_rewriter.py"),
    "process": (
        "conversion/test_memory_use.py",
        "conversion/test_circumstances.py",
        "conversion/test_threads.py",
    ),
    "region": ("artifact/test_graphs.py", "artifact/test_stored_generation.py"),
    "ops": ("ops/test_compositions.py",),
    "modules": ("modules/test_module_settings.py",),
    "runtime": ("runtime/test_between_calls.py", "artifact/test_graphs_of_changed_models.py"),
    "": ("runtime/test_between_calls.py", "matching/test_rewriter.py"),
}
# The same for those that take longer.
GENERAL = {
    "ops": (
        "ops/test_registration.py", "ops/test_arguments.py", "ops/test_operators.py", "ops/test_transforms.py",
        "kernels/test_kernel_families.py",
    ),
    "modules": ("modules", "patterns/test_registry.py"),
    "patterns": ("patterns/test_registry.py", "patterns"),
    "kernels": ("kernels",),
    "": (
        "canonical/test_canonical.py", "capture/test_probing.py", "runtime/test_shared_state.py",
        "runtime/test_runtime.py", "runtime/test_training.py", "runtime/test_state_changes.py",
        "conversion/test_writes_to_itself.py", "test_counterexamples.py", "test_end_to_end.py",
    ),
}  # fmt: skip


@dataclass
class Mutant:
    """One fault: ``before`` is the line, or the text, that becomes ``after``; ``source`` is the file's text with it."""

    path: Path  # relative to the root
    line: int
    name: str
    before: str
    after: str
    source: str
    verdict: str = ""
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.name}\n      - {self.before}\n      + {self.after}"


class Place(NamedTuple):
    """Where an operator of cosmic-ray may put a fault: its ``occurrence`` there, and what tells it from others."""

    path: Path
    operator: str
    occurrence: int
    line: int
    text: str
    column: int
    index: int

    def mutant(self) -> Mutant:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.operators.provider import OperatorProvider

        mutated = mutate_code(self.path.read_text(), OperatorProvider()[self.operator](), self.occurrence)
        after = one_line(mutated.splitlines()[self.line - 1])
        return Mutant(self.path.relative_to(ROOT), self.line, self.operator, self.text, after, mutated)


def one_line(text: str) -> str:
    return " ".join(text.split())


def listed() -> list[Mutant]:
    """The faults of mutants_list.py; SystemExit(2) where the text of one is not there, or not once."""
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    mutants, missing = [], []
    for what, text, fault in FAULTS:
        places = [(path, source) for path, source in sources.items() for _ in range(source.count(text))]
        if len(places) != 1:
            missing.append(f"in {len(places)} places: {what}: {text!r}")
            continue
        ((path, source),) = places
        line = source[: source.index(text)].count("\n") + 1
        mutated = source.replace(text, fault)
        mutants.append(Mutant(path.relative_to(ROOT), line, what, one_line(text), one_line(fault), mutated))
    if missing:
        print("mutants_list.py has faults whose text is no more in the package:", *missing, sep="\n  ", file=sys.stderr)
        sys.exit(2)
    return mutants


def drawn(seed: int, count: int) -> list[Mutant]:
    """``count`` faults of cosmic-ray's operators, at most one of each file."""
    first = []
    for path in sorted(PACKAGE.rglob("*.py")) if count else ():
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(LEFT_OUT) and not name.endswith(("_cases.py", "__init__.py")):
            first += [min(places, key=rank(seed)) for places in [candidates(path)] if places]
    return [place.mutant() for place in sorted(first, key=rank(seed))[:count]]


def rank(seed: int) -> Callable[[Place], tuple[str, ...]]:
    """For each file the kinds of faults come in an order of chance, of each kind its places: most have a number."""

    def key(place: Place) -> tuple[str, ...]:
        kind = f"{seed} {place.path.name} {place.operator}"
        texts = kind, f"{kind} {place.text} {place.column} {place.index}"
        return tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts)

    return key


def candidates(path: Path) -> list[Place]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    source, provider, found = path.read_text(), OperatorProvider(), []
    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    for name in filter(OPERATORS.fullmatch, provider):
        operator, occurrence = provider[name](), -1
        for node in nodes:
            for index, ((line, column), _) in enumerate(operator.mutation_positions(node)):
                occurrence += 1
                if decides(node, path):
                    found.append(Place(path, name, occurrence, line, one_line(lines[line - 1]), column, index))
    return found


def decides(node, path: Path) -> bool:
    """Whether a fault in ``node`` may change a result: it is in no error, annotation or case of a pattern.

    The cases of a pattern, which are tests themselves, begin with the first class of its file.
    """
    line = node.start_pos[0]
    while node.parent is not None:
        checks = node.type == "atom_expr" and node.get_code(include_prefix=False).startswith("require")
        if checks or node.type in ("raise_stmt", "assert_stmt", "annassign", "tfpdef", "decorator", "fstring"):
            return False
        node = node.parent
    return path.parent.name != "patterns" or all(line < owner.start_pos[0] for owner in node.iter_classdefs())


def concerned(path: Path, root: Path) -> list[str]:
    """The test files and folders for a fault in ``path``, relative to ``root``, in the order in which they run."""
    stem, folder = path.stem, path.parts[1] if len(path.parts) > 2 else ""
    imports = re.compile(rf"^\s*(from|import) .*\b{stem}\b", re.MULTILINE)
    files = sorted((root / "tests").rglob("test_*.py"), key=lambda file: file.stat().st_size)
    folders = {folder, "modules"} if folder == "ops" else {folder}
    here = [file for file in files if not folder or file.parent.name in folders]
    named = [file for file in here if stem in file.stem or (folder and folder not in GENERAL)]
    importing = [file for file in files if imports.search(file.read_text())]
    first, general = ([root / "tests" / name for name in each.get(folder, each[""])] for each in (FIRST, GENERAL))
    return [str(file.relative_to(root)) for file in dict.fromkeys(first + named + general + importing)]


class Workplace:
    """A copy of the checkout in which one fault at a time is put."""

    def __init__(self, folder: Path):
        self.folder = folder
        ignored = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__", "*.egg-info", "_ops_cuda.so")
        shutil.copytree(ROOT, folder, ignore=ignored)
        self.passing: set[str] = set()

    def pytest(self, tests: list[str], limit: float) -> tuple[int | None, str]:
        """(exit status, None after ``limit`` seconds; output)"""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        own = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        own["CUDA_VISIBLE_DEVICES"] = ""  # a copy has no compiled kernels for CUDA
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=os.environ | own, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr

    def judge(self, mutant: Mutant, limit: float) -> None:
        """Sets the verdict: "killed" or "survived"."""
        start, file = time.monotonic(), self.folder / mutant.path
        original = file.read_text()
        file.write_text(mutant.source)
        try:
            status, output = self.pytest(concerned(mutant.path, self.folder), limit)
        finally:
            file.write_text(original)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - |$)", output, re.MULTILINE)
        mutant.verdict, mutant.detail = "killed", failed[1] if failed else f"exit status {status}"
        if status is None:
            mutant.detail = f"no end in {limit:.0f} s"
        elif status == 0:
            mutant.verdict, mutant.detail = "survived", ""
        elif failed and "::" in failed[1] and not self.passes(failed[1], limit):
            mutant.verdict, mutant.detail = "survived", f"{failed[1]} fails without the fault, too"
        mutant.seconds = time.monotonic() - start

    def passes(self, test: str, limit: float) -> bool:
        if test not in self.passing and self.pytest([test], limit)[0] == 0:
            self.passing.add(test)
        return test in self.passing


def judge_all(mutants: list[Mutant], jobs: int, limit: float) -> None:
    """Sets all verdicts, and prints each as it comes."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Workplace] = SimpleQueue()
        for index in range(jobs):
            free.put(Workplace(Path(folder) / str(index)))

        def judge(mutant: Mutant) -> None:
            place = free.get()
            try:
                place.judge(mutant, limit)
            finally:
                free.put(place)
            print(f"{mutant.verdict:9}{mutant.seconds:5.0f} s  {mutant}\n      {mutant.detail}", flush=True)

        list(pool.map(judge, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text in the name, the line or the file of a fault")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn faults (0)")
    parser.add_argument("--count", type=int, default=45, help="how many are drawn (45)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (1)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for the tests of one fault (900)")
    options = parser.parse_args()
    named = {name for tests in (FIRST, GENERAL) for names in tests.values() for name in names}
    missing = sorted(name for name in named if not (ROOT / "tests" / name).exists())
    if missing:
        parser.error(f"FIRST or GENERAL names tests that are not there: {', '.join(missing)}")
    mutants = [m for m in listed() + drawn(options.seed, options.count) if options.only in str(m)]
    known = {(one_line(text), one_line(fault)): reason for text, fault, reason in EQUIVALENT}
    equivalent = [mutant for mutant in mutants if (mutant.before, mutant.after) in known]
    mutants = [mutant for mutant in mutants if mutant not in equivalent]
    judge_all(mutants, options.jobs, options.limit)
    for mutant in equivalent:
        print(f"changes nothing: {mutant}\n      {known[mutant.before, mutant.after]}")
    survivors = [mutant for mutant in mutants if mutant.verdict == "survived"]
    for mutant in survivors:
        print(f"SURVIVED: {mutant}\n      {mutant.detail}")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed; {len(equivalent)} more change no result")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
