"""The pages of docs/ and the README: where they lead, what they name, and whether it is so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kfconvert
from kfconvert import second_names

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "first_ten_minutes.ipynb"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), NOTEBOOK]
# The code of own_operators.md needs nvcc, and that of patterns.md is run by test_examples.py.
ELSEWHERE = {DOCS / "own_operators.md", DOCS / "patterns.md", ROOT / "README.md"}
RUNNABLE = [page for page in PAGES if page not in ELSEWHERE and "```python" in page.read_text()]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def named(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file(page):
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_names_a_registry_or_a_path_of_a_machine(page):
    found = re.findall(r"pypi\.|anaconda\.|(?<![\w.~])/(?:tmp|work|home|root|Users)/\S*|\w:\\\S*", page.read_text())
    assert found == []


def test_the_pages_of_the_site_are_the_pages_that_there_are():
    settings = (ROOT / "mkdocs.yml").read_text()
    nav = settings[settings.index("\nnav:") : settings.index("\nexclude_docs:")]
    assert sorted(re.findall(r"\S+\.(?:md|ipynb)", nav)) == sorted(
        page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents
    )


@pytest.mark.parametrize("package", [kfconvert, kfconvert.ops, kfconvert.modules], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(package):
    text = (DOCS / "operators.md").read_text()
    second = second_names.TABLE.get(package.__name__, {})
    missing = [
        name
        for name in package.__all__
        if f"::: {package.__name__}.{name}\n" not in text
        and f"`{package.__name__}.{name}`" not in text
        and not (name in second and f"| `{name}` |" in text)
    ]
    assert missing == []


def test_the_symptoms_are_in_the_words_of_the_package():
    source = "\n".join(path.read_text() for path in sorted((ROOT / "kfconvert").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a message may go over several lines
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    symptoms = [symptom for row in rows for symptom in re.findall(r"`([^`]+)`", row)]
    assert len(symptoms) > 60
    assert [symptom for symptom in symptoms if symptom not in source] == []


def test_the_speeds_in_the_readme_are_those_that_were_measured():
    def rows(text, columns):
        cells = [line.strip("| ").split(" | ") for line in text.replace("**", "").splitlines() if line.startswith("| ")]
        return [row for row in cells if len(row) == columns and row[0] != "model"]

    measured = {row[0]: row[1:3] for row in rows((ROOT / "benchmarks" / "README.md").read_text(), 5)}
    shown = [row for row in rows((ROOT / "README.md").read_text(), 5) if f"{row[0]} b1" in measured]
    assert len(shown) == 10
    assert [[*measured[f"{row[0]} b1"], *measured[f"{row[0]} b32"]] for row in shown] == [row[1:] for row in shown]


def test_the_notebook_was_stored_as_it_runs_from_above():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.mark.heavy
@pytest.mark.parametrize("page", RUNNABLE, ids=named)
def test_the_code_of_a_page_runs(page, tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KFCONVERT_CACHE": "off"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
