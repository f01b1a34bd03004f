"""Answers per second, and response times, of the services in examples/: the original model, and the converted one.

    PYTHONPATH=. python scripts/bench_serving.py [--small] [--device cuda] [--clients 64] [--requests 50]
    PYTHONPATH=. python scripts/bench_serving.py language-model --clients 32
    PYTHONPATH=. python scripts/bench_serving.py diffusion --clients 32 --requests 10
    PYTHONPATH=. python scripts/bench_serving.py ray --replicas 2

The clients send requests at the same time, each the next one when it has its answer. Each answer is compared with the
output of the original model for that request alone. An answer that does not arrive is lost. A far answer is wrong, or
mixed up if it belongs to another request. "first ms" is the median time to the first line of an answer. "fallbacks"
counts calls of the converted model that ran original code.

With Ray Serve, the script kills a replica during a further run, and measures again when the new replica answers. The
exit code is 1 if an answer is lost, wrong or mixed up, or if there are fallbacks.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from bench_serving_answers import EXAMPLES, SERVICES

SECONDS_TO_START = 600
SECONDS_TO_END = 30
SECONDS_TO_ANSWER = 60
BAD = ("lost", "wrong", "mixed up")


class Response(NamedTuple):
    """What a client received for a request of one kind: None without an answer."""

    kind: int
    text: bytes | None
    first: float
    seconds: float

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in (self.text or b"").splitlines()]


class Load:
    """The responses to all requests of all clients.

    Args:
        service: the requests, and the check of their answers.
    """

    def __init__(self, port: int, service: Any):
        self.port, self.service = port, service
        self.responses: list[Response] = []

    def run(self, clients: int, requests: int) -> float:
        """Returns the seconds in which each of the ``clients`` received the answers to so many ``requests``."""
        begun = threading.Barrier(clients + 1)
        threads = [
            threading.Thread(target=self._client, args=(number, requests, begun), daemon=True)
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        begun.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _client(self, number: int, requests: int, begun: threading.Barrier) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_TO_ANSWER)
        begun.wait()
        for count in range(requests):
            kind = (number + count) % len(self.service.bodies)
            start = first = time.perf_counter()
            text = None
            try:
                connection.request("POST", "/predict", self.service.bodies[kind], {"Content-Type": "application/json"})
                response = connection.getresponse()
                line = response.readline()
                first = time.perf_counter()
                answer = line + response.read()
                text = answer if response.status == 200 else None
            except (OSError, http.client.HTTPException):
                connection.close()  # the next request opens it again
            self.responses.append(Response(kind, text, first - start, time.perf_counter() - start))
        connection.close()

    def outcomes(self) -> tuple[Counter[str], int, int | None]:
        """Returns the number of answers by outcome, their units, and the fallbacks that they report."""
        counts: Counter[str] = Counter()
        units, fallbacks = 0, []
        for response in self.responses:
            try:
                lines = response.lines()
                value = self.service.value(lines)
            except (ValueError, KeyError, TypeError):  # no answer, or a part of one
                counts["lost"] += 1
                continue
            counts[self.service.outcome(response.kind, value)] += 1
            units += self.service.units(value)
            fallbacks.append(lines[-1].get("fallbacks"))
        known = [each for each in fallbacks if each is not None]
        return counts, units, max(known, default=None)

    def replicas(self) -> set[int]:
        """The processes that answered."""
        return {response.lines()[-1]["replica"] for response in list(self.responses) if response.text}


def reported(name: str, load: Load, seconds: float) -> int:
    """Prints a row, and returns how many answers are bad, and fallbacks."""
    counts, units, fallbacks = load.outcomes()
    answered = [response for response in load.responses if response.text is not None]
    times = [[each.seconds for each in answered], [each.first for each in answered]]
    p50, p99, first = (
        f"{1e3 * torch.tensor(values, dtype=torch.float64).quantile(share):.1f}" if answered else "-"
        for values, share in ((times[0], 0.5), (times[0], 0.99), (times[1], 0.5))
    )
    bad = [counts[each] for each in BAD]
    row = f"{name:<10}{units / seconds:>12.1f}{p50:>10}{p99:>10}{first:>10}"
    print(row + "".join(f"{count:>10}" for count in bad) + f"{'-' if fallbacks is None else fallbacks:>11}", flush=True)
    return sum(bad) + (fallbacks or 0)


@contextlib.contextmanager
def served(script: str, arguments: list[str]) -> Iterator[int]:
    """The port of a service with these arguments, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / script, "--port", str(port), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its workers end with it
    )
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True).start()
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("".join(said[-20:]) + "the service did not start")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()  # Ray ends its processes then
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def kill_replica(load: Load, responses: int, replica: int) -> None:
    """Kills a replica when there are so many ``responses``."""
    while len(load.responses) < responses:
        time.sleep(0.01)
    os.kill(replica, signal.SIGKILL)


def bench_killed(port: int, service: Any, options: argparse.Namespace, replicas: set[int]) -> int:
    """Measures while one of the ``replicas`` dies, and again when Ray Serve has replaced it."""
    load = Load(port, service)
    when = options.clients * options.requests // 3
    threading.Thread(target=kill_replica, args=(load, when, min(replicas)), daemon=True).start()
    failed = reported("killed", load, load.run(options.clients, options.requests))
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        load = Load(port, service)
        seconds = load.run(options.clients, options.requests)
        if load.replicas() - replicas:
            return failed + reported("restarted", load, seconds)
    raise SystemExit("Ray Serve did not replace the killed replica")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("service", nargs="?", choices=SERVICES, default="classifier")
    parser.add_argument("--small", action="store_true", help="a small model, for one core of a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=50, help="of each client")
    parser.add_argument("--replicas", type=int, default=2, help="of Ray Serve")
    options = parser.parse_args(argv)
    script, make = SERVICES[options.service]
    service = make(options.small, options.device)
    with_replicas = options.service == "ray"
    shared = ["--device", options.device, *(["--small"] if options.small else [])]
    shared += ["--replicas", str(options.replicas)] if with_replicas else []
    print(f"{options.clients} clients, {options.clients * options.requests} requests each time\n")
    titles = f"{'p50 ms':>10}{'p99 ms':>10}{'first ms':>10}" + "".join(f"{each:>10}" for each in BAD)
    print(f"{'served':<10}{service.unit + '/s':>12}{titles}{'fallbacks':>11}", flush=True)
    failed = 0
    for name, more in (("original", ["--original"]), ("converted", [])):
        with served(script, [*shared, *more]) as port:
            Load(port, service).run(options.clients, 2)  # the server makes its connections and threads
            load = Load(port, service)
            failed += reported(name, load, load.run(options.clients, options.requests))
            if with_replicas and not more:
                failed += bench_killed(port, service, options, load.replicas())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
