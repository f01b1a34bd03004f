"""A language model of letters, trained on data/harbour.txt, then converted.

    python examples/language_model.py [--small] [--device cuda]

You learn that a model is trained first and converted afterwards, that its quality, here the loss on lines that it has
not seen, is that of the original, and that it still generates: each letter is drawn from what the model says of the
letters before it, and from the same draws both models make the same text, unless a draw
lies within a rounding of the border between two letters.
"""

from pathlib import Path

import torch
from shared import converted, options_of
from torch import nn
from torch.nn import functional as F

import kfconvert

TEXT = (Path(__file__).parent / "data" / "harbour.txt").read_text(encoding="utf-8")
HELD_OUT = 0.1  # of the text, its end
CONTEXT = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward, each with a norm before it. (batch, length, width) -> the same"""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        query, key, value = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Scores of the letter that comes next. ids: (batch, length), up to CONTEXT -> (batch, length, vocabulary)"""

    def __init__(self, vocabulary, width, heads, layers):
        super().__init__()
        self.letters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def windows(ids, starts):
    """(batch, CONTEXT + 1) pieces of the text: what is read, and one on what is to be said."""
    return torch.stack([ids[start : start + CONTEXT + 1] for start in starts])


def loss(model, pieces):
    """Mean cross entropy of the next letter, in nats."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(model, ids, steps):
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (16,)).tolist()
        optimizer.zero_grad()
        loss(model, windows(ids, starts)).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def held_out_loss(model, ids):
    return loss(model, windows(ids, range(0, len(ids) - CONTEXT, CONTEXT // 4))).item()


@torch.no_grad()
def generated(model, ids, count):
    torch.manual_seed(1)
    for _ in range(count):
        shares = model(ids[None, -CONTEXT:])[0, -1].softmax(-1)
        ids = torch.cat((ids, torch.multinomial(shares.cpu(), 1).to(ids.device)))
    return ids


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(letter) for letter in TEXT], device=options.device)
    seen, held_out = ids.split([len(ids) - int(HELD_OUT * len(ids)), int(HELD_OUT * len(ids))])
    sizes = {"width": 64, "heads": 2, "layers": 2} if options.small else {"width": 128, "heads": 4, "layers": 3}
    model = LanguageModel(len(letters), **sizes).to(options.device)
    before = held_out_loss(model, held_out)
    train(model, seen, 60 if options.small else 120)
    trained = held_out_loss(model, held_out)
    print(f"loss on lines that were not seen: {before:.3f} before training, {trained:.3f} after it")

    example = windows(held_out, [0])[:, :-1]
    fused = converted("LanguageModel", model, example, options.small)
    print(f"loss of the converted model: {held_out_loss(fused, held_out):.3f}")
    texts = [generated(which, seen[:CONTEXT], 40 if options.small else 200) for which in (model, fused)]
    print("generated:", repr("".join(letters[index] for index in texts[1].tolist()[CONTEXT:])))
    print(f"the same text as by the original: {torch.equal(*texts)}")
    accurate, speedup = kfconvert.validate_optimization(model, fused, example)
    print(f"accurate {accurate}, {speedup:.2f} x as fast as the original")
    return 0 if accurate and trained < before else 1


if __name__ == "__main__":
    raise SystemExit(main())
