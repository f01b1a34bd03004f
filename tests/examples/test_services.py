"""The services in examples/, and their load test."""

import base64
import http.server
import importlib
import json
import threading
from pathlib import Path

import pytest
import torch
from test_many_processes import finished

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    pytest.importorskip("litserve")
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture
def bench():
    """The load test as a module."""
    return importlib.import_module("bench_serving")


@pytest.mark.parametrize(
    ("options", "packages", "rows"),
    [
        ("--clients 64 --requests 10", [], ["original", "converted"]),
        ("language-model --clients 32 --requests 2", [], ["original", "converted"]),
        ("diffusion --clients 32 --requests 2", ["diffusers"], ["original", "converted"]),
        ("ray --clients 16 --requests 10", ["ray.serve"], ["original", "converted", "killed", "restarted"]),
    ],
)
def test_a_service_loses_no_answer_mixes_none_up_and_runs_fused(options, packages, rows):
    for package in packages:
        pytest.importorskip(package)
    out = finished(ROOT / "scripts" / "bench_serving.py", "--small", "--device", "cpu", *options.split())
    lines = [line.split() for line in out.splitlines() if line.startswith(tuple(rows))]
    assert [line[0] for line in lines] == rows
    clients, requests = (int(options.split()[options.split().index(name) + 1]) for name in ("--clients", "--requests"))
    assert out.startswith(f"{clients} clients, {clients * requests} requests")
    assert all(float(line[1]) > 0 and line[-4:-1] == ["0", "0", "0"] for line in lines), out
    assert [line[-1] for line in lines] == ["-", *["0"] * (len(rows) - 1)], out


@pytest.fixture
def port():
    """Of a service that answers as the request says."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked is None:
                self.close_connection = True  # no answer at all
                return
            text = json.dumps({"scores": asked, "fallbacks": len(asked)}).encode()
            self.send_response(200 if asked else 500)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_the_load_test_counts_what_is_lost_wrong_and_mixed_up(bench, port, capsys):
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.5], [0.5, 0.0], [0.2, 0.0]])
    answers = [[1.0, 1e-4], [1.0, 0.0], [3.0, 3.0], [1.0], [], None]
    bodies = [json.dumps(answer).encode() for answer in answers]
    answers = importlib.import_module("bench_serving_answers")
    service = answers.Nearest(bodies, expected, answers.OF_SCORES, lambda line: torch.tensor(line["scores"]))
    load = bench.Load(port, service)
    seconds = load.run(6, 6)
    assert load.outcomes() == ({"right": 6, "mixed up": 6, "wrong": 12, "lost": 12}, 24, 2)
    assert bench.reported("served", load, seconds) == 32
    assert capsys.readouterr().out.split()[-4:] == ["12", "12", "6", "2"]


@pytest.fixture
def language(monkeypatch):
    """The service of a language model as a module, with few batch sizes."""
    module = importlib.import_module("serve_language_model")
    monkeypatch.setattr(module, "BUCKETS", (1, 4))
    return module


@pytest.fixture
def service(language):
    service = language.Service(small=True, original=True)
    service.setup("cpu")
    return service


def said(service, prompts):
    """The lines of the answer to each prompt."""
    texts = zip(*service.encode_response(service.predict(prompts)), strict=True)
    return [[json.loads(line) for line in "".join(each).splitlines()] for each in texts]


def test_prompts_of_a_batch_get_the_tokens_of_the_model_alone(language, service, monkeypatch):
    prompts = [language.Prompt(tokens=range(3, 3 + length), max_new_tokens=length) for length in (5, 9, 70)]
    alone = [
        service.model.generate(
            torch.tensor([prompt.tokens]), max_new_tokens=prompt.max_new_tokens, do_sample=False
        )[0, len(prompt.tokens) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    expected = [
        [*({"token": token} for token in tokens), {"tokens": len(tokens), "fallbacks": None}] for tokens in alone
    ]
    assert said(service, prompts) == expected
    assert alone[0][2] not in alone[0][:2]
    monkeypatch.setattr(language, "END", alone[0][2])
    assert said(service, prompts[:1]) == [[*expected[0][:3], {"tokens": 3, "fallbacks": None}]]

    answers = importlib.import_module("bench_serving_answers").Tokens(service.model, prompts, end=2)
    assert answers.value(expected[1]) == tuple(alone[1])
    with pytest.raises(ValueError, match="missing"):
        answers.value(expected[1][1:])
    outcomes = [answers.outcome(1, tuple(tokens)) for tokens in (alone[1], alone[0], alone[1][:-1], alone[1][::-1])]
    assert outcomes == ["right", "mixed up", "wrong", "wrong"]


def test_an_error_of_generate_ends_the_stream(language, service, monkeypatch):
    def broken(streamer, **_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(service.model, "generate", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        said(service, [language.Prompt(tokens=[3])])


@pytest.mark.parametrize("wrong", [{"tokens": []}, {"tokens": [32000]}, {"tokens": [3], "max_new_tokens": 0}])
def test_a_prompt_that_the_model_cannot_take_is_refused(language, wrong):
    with pytest.raises(ValueError, match="validation error"):
        language.Prompt(**wrong)


@pytest.mark.parametrize("image", ["", "AAAAAA==", "?", 3, None])
def test_an_image_that_the_classifier_cannot_take_is_refused(bench, image):
    serving = importlib.import_module("serving")
    with pytest.raises(ValueError, match="validation error"):
        serving.Image(image=image)


def test_images_are_resized(bench):
    serving = importlib.import_module("serving")
    pixels = serving.Image(image=base64.b64encode(bytes(range(75)))).image
    assert serving.decoded(pixels, 5).shape == (3, 5, 5) and serving.decoded(pixels, 9).shape == (3, 9, 9)
