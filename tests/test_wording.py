"""A lint of the wording in the docs, and in comments and strings of the package. The rules are in docs/style.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The recorded numbers of banned words. A number may only fall: whoever removes words lowers it.
MOST = {"docs": 0, "package": 0}

PHRASES = ("told", "tells", "lies", "mend", "mends", "mended", "beside", "of its own", "as ever", "is looked")
GAP = r"\s+(?:#\s*)?"  # a phrase may continue on the next line, also of a comment
BANNED = re.compile(rf"\b(?:{'|'.join(phrase.replace(' ', GAP) for phrase in PHRASES)})\b", re.IGNORECASE)
# In Python, in this order: comments on consecutive lines, triple-quoted strings, other strings.
TEXT = re.compile(
    r"#[^\n]*(?:\n[ \t]*#[^\n]*)*"
    r'|(?P<f3>[rRbB]?[fF][rR]?)?(?:"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\')'
    r'|(?P<f1>[rRbB]?[fF][rR]?)?(?:"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')',
    re.DOTALL,
)
# Names of code are no words: `told` in Markdown, ``told`` in docstrings, {told} in f-strings.
CODE = re.compile(r"(`+)[^`]+?\1")
FIELD = re.compile(r"\{[^{}]*\}")
TARGET = re.compile(r"\]\([^)]*\)")  # of a link


def blank(match):
    """The lines of a match, empty, so that line numbers stay."""
    return re.sub(r"[^\n]", " ", match.group())


def hits(path, texts):
    """'file:line: phrase' for each banned phrase in ``texts``, which are pairs of an offset in the file and a text."""
    source, name = path.read_text(), path.relative_to(ROOT).as_posix()
    for offset, text in texts(source):
        for match in BANNED.finditer(CODE.sub(blank, text)):
            line = source.count("\n", 0, offset + match.start()) + 1
            yield f"{name}:{line}: {' '.join(match.group().replace('#', ' ').split())}"


def markdown(source):
    yield 0, TARGET.sub(blank, source)


def python(source):
    for match in TEXT.finditer(source):
        is_formatted = match["f3"] or match["f1"]
        yield match.start(), FIELD.sub(blank, match.group()) if is_formatted else match.group()


def pages():
    paths = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(paths)


AREAS = {
    "docs": lambda: [hit for path in pages() for hit in hits(path, markdown)],
    "package": lambda: [hit for path in sorted((ROOT / "kfconvert").rglob("*.py")) for hit in hits(path, python)],
}


@pytest.mark.parametrize("area", AREAS)
def test_banned_words_become_fewer(area):
    found, most = AREAS[area](), MOST[area]
    assert len(found) <= most, "\n".join(
        [f"{len(found)} banned words in the {area}, {most} are allowed; see docs/style.md. They are:", *found]
    )
    assert len(found) == most, f"{most - len(found)} fewer than recorded: lower MOST[{area!r}] to {len(found)}"


def test_names_of_code_are_no_banned_words(tmp_path):
    code = '''told = f"{told} the {beside}"  # a word that is told, of its
# own
"""Says ``tells``.

It lies here.
"""
'''
    found = [BANNED.findall(CODE.sub(blank, text)) for _, text in python(code)]
    assert [[" ".join(hit.replace("#", " ").split()) for hit in each] for each in found] == [
        [],
        ["told", "of its own"],
        ["lies"],
    ]
    assert not BANNED.search(CODE.sub(blank, next(markdown("[a](beside.md) `told`"))[1]))
