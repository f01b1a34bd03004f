"""The page: all that there is to tell, of any conversion, and nothing that the statistics could make it do."""

import copy
import re
from html.parser import HTMLParser

import pytest
from support import statistics as made
from support.selection import each_once

from kfconvert.artifact import schema
from kfconvert.report import fragment, page

SECTIONS = ["Speed", "Modules", "Not fused", "Accuracy", "Memory", "Environment"]
ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}",
    "<!--",
    "\ud800\x00\x1b[2J\u202e",
]
VOID = {"meta", "br"}


class Page(HTMLParser):
    """What a page consists of; every element that is opened must be closed, in order."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def headings(self, level: str) -> list[str]:
        return [value for tag, name, value in self.attributes if tag == level and name == "aria-label"]


def checked(statistics: dict) -> dict:
    """``statistics``, which an artifact may have."""
    schema.Record.model_fields["statistics"].annotation.model_validate(copy.deepcopy(statistics))
    return statistics


def test_one_look_tells_it_all():
    text = Page(page(checked(made.statistics()), "tiny-bert", "random")).text
    for fact in (
        "tiny-bert LanguageModel input_ids=int64[1, 64] a CPU float32",
        "Speed 1.30 × faster 1.90 ms → 1.46 ms per call",
        "Fused 10 of 14 sites, 92 % of their time",
        "Accuracy pass error 2.6e-07, original 1.8e-07",
        "Memory + 3.0 MiB 100 % of the weights",
        "The weights are random",
        "original 1.90 ms converted 1.46 ms",
        "original 1.80 ms 1.90 ms 1.99 ms 80",
        "1.30 x faster (95 % between 1.28 and 1.33)",
        "generate(): prompt 1 x 32, 64 new: 200 -> 260 tokens/s",
        "int64[32, 64] 0.2 original 40.0 ms",
        "All sites 10 of 14 before and after: 700 µs → 625 µs share fused: 92 %",
        "encoder.layer 9 of 12 sites",
        "query merged_linear: fused (kernel) before and after: 50.0 µs → 40.0 µs share fused: 100 %",
        "output linear: not fused before and after: 18.3 µs → 18.3 µs share fused: 0 %",
        "linear 3 not faster: kernel takes 20.2 us, the original 18.3 us encoder.layer.0.attention.output",
        "linear_tanh 1 error 2.1e-03 against float64, allowed 9.8e-04 pooler",
        "linear_relu head its value goes to aten.elu (net.py:31)",
        "mask: its values decide",
        ".pooled 1.0e-07 not finite",
        "2 integers differ",
        "weights 3.0 MiB derived 1.0 MiB CUDA graphs 2.0 MiB",
        "original model 352.0 KiB converted model 192.9 KiB",
        "compiled kernels yes",
        "exclude conv*",
        "trace 1.74 s",
    ):
        assert fact in text, fact


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("made_by", [page, fragment])
def test_every_conversion_has_a_page(kind, made_by):
    found = Page(made_by(checked(made.KINDS[kind]())))
    sections = SECTIONS if "memory" in made.KINDS[kind]() and kind != "nothing found" else set(SECTIONS) - {"Memory"}
    assert [each for each in SECTIONS if each in sections] == found.headings("section")
    assert ("Undefined" not in found.text) and ("None" not in found.text)


def test_what_failed_is_said_first():
    text = Page(page(checked(made.given_back()))).text
    assert text.index("The original is returned: output.hidden has error") < text.index("Modules")
    assert "Accuracy fail" in text and "Fused 0 of 14" in text and "Speed not measured" in text
    assert "Nothing was fused, so the original is returned: none of its calls" in Page(page(made.nothing_found())).text


@each_once(attack=ATTACKS, made_by=[page, fragment])
def test_texts_stay_texts(attack, made_by):
    usual, stats = made.statistics(), made.with_texts(made.statistics(), attack)
    stats["timings"]["timings"][attack] = made.timing(2.0)
    stats["seconds"][attack] = stats["environment"][attack] = 1.0
    html = made_by(checked(stats))
    html.encode()
    found = Page(html)
    assert set(found.tags) <= set(Page(made_by(usual)).tags)
    names = {"aria-label", "class", "style", "scope", "role", "tabindex", "aria-hidden", "open", "lang", "charset",
             "http-equiv", "content", "name"}  # fmt: skip
    assert {name for _, name, _ in found.attributes} <= names
    styles = {value for _, name, value in found.attributes if name == "style"}
    assert all(re.fullmatch(r"(width|left):-?[\d.]+%", value) for value in styles)
    assert "\x1b" not in html and "\u202e" not in html and "49" not in re.findall(r"<h1>(.*)</h1>", html)[0]


def test_it_loads_nothing_and_runs_nothing():
    html = page(made.statistics())
    assert "default-src 'none'" in html and not re.search(r"https?:|<script|<link|@import|url\(|\ssrc=|\shref=", html)
    assert not re.search(r"https?:|<script|<link|@import|url\(|\ssrc=|\shref=", fragment(made.statistics()))


def test_it_is_read_aloud_in_order():
    found = Page(page(made.statistics()))
    levels = [int(tag[1]) for tag in found.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in zip(levels, levels[1:]))
    assert found.tags.count("caption") == found.tags.count("table")
    labelled = [tag for tag, name, _ in found.attributes if name == "aria-label"]
    assert labelled.count("section") == len(SECTIONS)
    assert ("html", "lang", "en") in found.attributes


NUMBERS = [0, -1, 0.0, -0.5, 1e-320, 1e308, -1e308, 2**62]


def with_number(value, number, kind):
    if isinstance(value, dict):
        return {key: with_number(each, number, kind) for key, each in value.items()}
    if isinstance(value, list):
        return [with_number(each, number, kind) for each in value]
    return number if type(value) in kind else value


@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_has_a_page(number):
    stats = made.statistics()
    kind = (float, int) if isinstance(number, int) and number >= 0 else (float,)
    Page(page(checked(with_number(stats, number, kind))))


def test_a_speed_up_that_was_infinite_is_none():
    stats = made.statistics()
    stats["timings"]["speedups"]["converted"] |= {"ratio": None, "low": None, "high": None}
    assert "the speed-up cannot be determined" in Page(page(checked(stats))).text
