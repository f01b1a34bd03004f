"""A service of a language model: LitServe batches the prompts that wait, and streams the tokens of each answer.

    pip install litserve
    python examples/serve_language_model.py [--small] [--device cuda] [--port 8000] [--original]

You learn that a converted model generates for padded batches and passes each token to a streamer. On CUDA, kfconvert
records one step for each batch size and capacity of the cache, and keeps four. So the service pads batches to three
sizes, and prompts to multiples of 64 tokens. With effort="fast", kfconvert captures padded prompts because the example
call has an attention mask.

A request is {"tokens": [...], "max_new_tokens": n}. Its answer has a line {"token": t} for each token, and a last line
{"tokens": count, "fallbacks": count}; an answer without the last line is incomplete. Decoding is greedy.
"""

import json
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import pydantic
import serving
import torch
import transformers
from shared import converted

BUCKETS = (1, 8, 32)
SECONDS_TO_FILL = 0.02  # that the first prompt of a batch waits for others
SECONDS_PER_CHUNK = 0.02  # tokens within this time share a chunk of the stream
ROOM, MOST_ROOM, MOST_NEW = 64, 1024, 256
PADDING, END = 0, 2
VOCABULARY = 32000


class Prompt(pydantic.BaseModel):
    """A request. FastAPI rejects others before they join a batch."""

    tokens: list[Annotated[int, pydantic.Field(ge=0, lt=VOCABULARY)]] = pydantic.Field(
        min_length=1, max_length=MOST_ROOM
    )
    max_new_tokens: int = pydantic.Field(ROOM, ge=1, le=MOST_NEW)


def language_model(small, device):
    """A LLaMA; a seed makes its weights, so that all processes have the same."""
    sizes = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        if small
        else {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    )
    heads = 2 if small else 4
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=heads, vocab_size=VOCABULARY, pad_token_id=PADDING)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    return model.to(torch.bfloat16) if torch.device(device).type == "cuda" else model


class Streamer:
    """Receives the prompts, then the token of each row in each step, and puts the latter into a queue."""

    def __init__(self):
        self.steps = queue.SimpleQueue()
        self.has_prompts = False

    def put(self, tokens):
        if self.has_prompts:
            self.steps.put(tokens.tolist())
        self.has_prompts = True

    def end(self):
        self.steps.put(None)

    def chunks(self):
        """Yields lists of steps, at most one list per SECONDS_PER_CHUNK."""
        chunk, due = [], 0.0
        for step in iter(self.steps.get, None):
            chunk.append(step)
            if time.monotonic() >= due:
                yield chunk
                chunk, due = [], time.monotonic() + SECONDS_PER_CHUNK
        if chunk:
            yield chunk


class Service(serving.litserve().LitAPI):
    """What LitServe does with requests, in a separate process."""

    def __init__(self, small, original):
        super().__init__(max_batch_size=BUCKETS[-1], batch_timeout=SECONDS_TO_FILL, stream=True)
        self.small, self.original = small, original

    def setup(self, device):
        self.place = device
        self.thread = ThreadPoolExecutor(1)  # runs generate(), while this thread streams
        self.model = language_model(self.small, device)
        if not self.original:
            ids = torch.randint(3, VOCABULARY, (BUCKETS[0 if self.small else -1], ROOM), device=device)
            mask = torch.ones_like(ids)
            mask[0, 0] = 0
            example = {"input_ids": ids, "attention_mask": mask}
            self.model = converted("LLaMA", self.model, example, self.small, effort="fast")
        for size in BUCKETS:
            for _ in range(2):  # the second call with a size records it
                list(self.predict([Prompt(tokens=[3], max_new_tokens=ROOM)] * size))

    def decode_request(self, request: Prompt):
        return request

    def predict(self, prompts):
        """Yields for each chunk of the stream the lines of each answer."""
        rows = prompts + prompts[:1] * (serving.bucket(len(prompts), BUCKETS) - len(prompts))
        room = ROOM * -(-max(len(row.tokens) for row in rows) // ROOM)
        ids = torch.tensor([[PADDING] * (room - len(row.tokens)) + row.tokens for row in rows])
        mask = torch.tensor([[0] * (room - len(row.tokens)) + [1] * len(row.tokens) for row in rows])
        streamer = Streamer()
        generated = self.thread.submit(
            self._generate,
            streamer,
            input_ids=ids.to(self.place),
            attention_mask=mask.to(self.place),
            max_new_tokens=max(row.max_new_tokens for row in rows),
        )
        answers = [Answer(prompt.max_new_tokens) for prompt in prompts]
        for chunk in streamer.chunks():
            count = serving.fallbacks(self.model)
            yield [answer.lines([step[row] for step in chunk], count) for row, answer in enumerate(answers)]
        generated.result()  # raises the error that ended the stream, if there was one

    def encode_response(self, chunks):
        for chunk in chunks:
            yield ["".join(json.dumps(line) + "\n" for line in lines) for lines in chunk]

    def _generate(self, streamer, **arguments):
        try:
            self.model.generate(**arguments, streamer=streamer, do_sample=False)
        finally:
            streamer.end()


class Answer:
    """The part of an answer that was streamed, of at most ``most`` tokens."""

    def __init__(self, most):
        self.most, self.count, self.is_complete = most, 0, False

    def lines(self, tokens, fallbacks):
        """The lines for further tokens: none after the last one."""
        said = []
        for token in tokens:
            if self.is_complete:
                break
            self.count += 1
            said.append({"token": token})
            if token == END or self.count == self.most:
                self.is_complete = True
                said.append({"tokens": self.count, "fallbacks": fallbacks})
        return said


def main(argv=None):
    options = serving.options_of_service(__doc__).parse_args(argv)
    serving.serve_with_litserve(Service(options.small, options.original), options)


if __name__ == "__main__":
    raise SystemExit(main())
