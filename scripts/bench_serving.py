"""Requests a second, and how long one takes, of examples/serve_litserve.py: the model as it was, and converted.

    PYTHONPATH=. python scripts/bench_serving.py [--small] [--device cuda] [--clients 64] [--requests 50]

So many clients ask the service on this machine at a time, each the next image when it has its answer. Each answer is
compared with what the model says of that image alone: one that does not come is lost, one that is far from it wrong,
and one that is that of another image mixed up. Where there is any of these, the exit code is 1.
"""

from __future__ import annotations

import argparse
import base64
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
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from serve_litserve import as_input, classifier, images  # noqa: E402

SECONDS_TO_START = 300
SECONDS_TO_ANSWER = 60
KINDS = 32  # of images; each is asked for many times
TOLERANCE = 0.005  # of the largest score: batches of another size take other kernels, and TF32 rounds


class Load:
    """What became of the requests of all clients.

    Args:
        bodies: the request for each kind of image.
        expected: (kinds, scores) what the model says of each kind alone.
    """

    def __init__(self, port: int, bodies: list[bytes], expected: torch.Tensor):
        self.port, self.bodies, self.expected = port, bodies, expected
        self.outcomes: Counter[str] = Counter()
        self.seconds: list[float] = []  # of each request that was answered
        self._lock = threading.Lock()

    def run(self, clients: int, requests: int) -> float:
        """Seconds that ``clients`` took for ``requests`` each."""
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
            kind = (number + count) % len(self.bodies)
            start = time.perf_counter()
            try:
                connection.request("POST", "/predict", self.bodies[kind], {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer, status = response.read(), response.status
            except (OSError, http.client.HTTPException):
                connection.close()  # the next request opens it anew
                status = None
            seconds = time.perf_counter() - start
            outcome = self._outcome(kind, json.loads(answer)["scores"]) if status == 200 else "lost"
            with self._lock:
                self.outcomes[outcome] += 1
                if outcome != "lost":
                    self.seconds.append(seconds)
        connection.close()

    def _outcome(self, kind: int, scores: list[float]) -> str:
        if len(scores) != self.expected.shape[1]:
            return "wrong"
        distances = (self.expected - torch.tensor(scores)).abs().amax(1)
        allowed = TOLERANCE * self.expected.abs().max()
        if distances[kind] <= allowed:
            return "right"
        return "mixed up" if distances.min() <= allowed else "wrong"


@contextlib.contextmanager
def served(arguments: list[str]) -> Iterator[int]:
    """The port of a service with these arguments, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "serve_litserve.py", "--port", str(port), *arguments],
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


def kinds(small: bool, device: str) -> tuple[list[bytes], torch.Tensor]:
    """(bodies of requests, what the model says of each image alone)"""
    model, size = classifier(small)
    pixels = images(KINDS, size)
    with torch.no_grad():
        expected = torch.cat([model.to(device)(as_input(image[None]).to(device)).cpu() for image in pixels])
    apart = (expected[:, None] - expected).abs().amax(2).fill_diagonal_(float("inf")).min()
    if apart < 5 * TOLERANCE * expected.abs().max():
        raise SystemExit("the answers for two images are so near that none could be told to be mixed up")
    bodies = [json.dumps({"image": base64.b64encode(bytes(image.flatten())).decode()}).encode() for image in pixels]
    return bodies, expected


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, for one core of a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=50, help="of each client")
    options = parser.parse_args(argv)
    bodies, expected = kinds(options.small, options.device)
    shared = ["--device", options.device, *(["--small"] if options.small else [])]
    total, failed = options.clients * options.requests, 0
    print(f"{options.clients} clients, {total} requests each time\n")
    print(f"{'served':<10}{'requests/s':>12}{'p50 ms':>10}{'p99 ms':>10}{'lost':>8}{'wrong':>8}{'mixed up':>10}")
    for name, more in (("original", ["--original"]), ("converted", [])):
        with served([*shared, *more]) as port:
            Load(port, bodies, expected).run(options.clients, 2)  # connections and threads of the server are made
            load = Load(port, bodies, expected)
            seconds = load.run(options.clients, options.requests)
        bad = {kind: load.outcomes[kind] for kind in ("lost", "wrong", "mixed up")}
        failed += sum(bad.values())
        if load.seconds:
            times = torch.tensor(load.seconds, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99]).double()) * 1e3
            p50, p99 = (f"{value:.1f}" for value in times.tolist())
        else:
            p50 = p99 = "-"
        row = f"{name:<10}{len(load.seconds) / seconds:>12.1f}{p50:>10}{p99:>10}"
        print(row + "".join(f"{count:>{width}}" for count, width in zip(bad.values(), (8, 8, 10))), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
