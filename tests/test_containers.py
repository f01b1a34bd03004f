"""The Dockerfile, docker-compose.yml and the workflow name what there is; nothing here builds an image."""

import os
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
INSTRUCTIONS = [line.split(maxsplit=1) for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
TARGETS = {
    target for line in re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M) for target in line.split()
}


def arguments(name):
    return [shlex.split(rest) for instruction, rest in INSTRUCTIONS if instruction == name]


def stages():
    return [words[2] for words in arguments("FROM")]


def made(texts):
    """The targets that `make` is called with in commands."""
    return {target for text in texts for target in re.findall(r"(?:^|'|&& |=\S+ )make ([\w-]+)", text)}


def test_there_are_images_for_the_cpu_and_for_cuda():
    assert {"cpu", "cuda", "dev", "dev-cuda"} <= set(stages())
    bases = [words[0] for words in arguments("FROM") if words[0] not in stages()]
    assert all(re.fullmatch(r"(ubuntu|nvidia/cuda):[\w.-]+", base) for base in bases), "docker's default registry"


def test_what_a_stage_takes_comes_from_one_before_it():
    seen = []
    for instruction, rest in INSTRUCTIONS:
        words = rest.split()
        if instruction == "FROM":
            assert ":" in words[0] or words[0] in seen
            seen.append(words[2])
        elif instruction == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in seen[:-1]


def test_what_is_copied_exists_and_is_not_ignored():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    copied = [source for words in arguments("COPY") if "=" not in words[0] for source in words[:-1]]
    assert len(copied) >= 4
    for source in copied:
        assert (ROOT / source).exists()
        assert not any(fnmatch(source, pattern) for pattern in patterns if source != ".")
    needed = ["kfconvert", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "docs", "scripts"]
    assert not [name for name in needed if any(fnmatch(name, pattern) for pattern in patterns)]


def test_make_is_called_with_targets_that_it_has():
    services = COMPOSE["services"]
    commands = [" ".join(words) for words in arguments("RUN")] + [service["command"] for service in services.values()]
    assert made(commands) == {"packages", "dist", "build"} and made(commands) <= TARGETS
    assert made(step.get("run", "") for step in STEPS) <= TARGETS


def test_each_service_is_a_target_of_make_and_runs_an_image_of_the_dockerfile():
    services = COMPOSE["services"]
    assert set(services) == {"dev", "dev-cuda", "jupyter", "jupyter-cuda"} <= TARGETS
    for name, service in services.items():
        target = service["build"]["target"]
        assert target in stages() and service["image"] == f"kfconvert:{target}"
        assert ("deploy" in service) == name.endswith("-cuda") == target.endswith("-cuda")
        assert {volume.split(":")[0] for volume in service["volumes"]} - {"."} <= set(COMPOSE["volumes"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_workflow_runs_what_ci_runs():
    assert any(step.get("run") == ".ci/run" for step in STEPS)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
