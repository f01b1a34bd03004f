"""Trained models are converted, saved, and loaded again, by kfconvert and without it.

    python examples/convert_pretrained_models.py [--small] [--device cuda] [--save-path out]

You learn what an artifact is: a folder with the original weights under their own names and a record of the conversion.
kfconvert.load gives the converted model, whose outputs are those of the one that was saved; transformers reads the same
folder by from_pretrained, and gets the original. Weights are random, and that is said, where no hub can be reached. The
small form takes two models with few and narrow layers.
"""

import copy
import tempfile
from pathlib import Path

import small_models
import torch
from shared import by_name, converted, moved, options_of
from transformers import AutoModel, PreTrainedModel

import kfconvert

MODELS = ("resnet50", "bert-base-uncased")


def examples(options):
    """(name, model, example inputs)"""
    if options.small:
        yield "small-resnet", *small_models.resnet()
        yield "small-bert", *small_models.bert()
    else:
        for name in MODELS:
            entry = by_name(name)
            yield name, entry.model, entry.example_inputs


def blank(model):
    """Another model of the kind, whose weights are yet to be loaded."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


def call(model, inputs):
    with torch.no_grad():
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.last_hidden_state


def main(argv=None):
    parser = options_of(__doc__)
    parser.add_argument("--save-path", type=Path, help="where to save  [default: a folder that goes at the end]")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        for name, model, inputs in examples(options):
            model, inputs = model.eval().to(options.device), moved(inputs, options.device)
            fused = converted(name, model, inputs, options.small)
            folder = Path(kfconvert.save(fused, (options.save_path or Path(temporary)) / name))
            print(f"  saved: {', '.join(sorted(file.name for file in folder.iterdir()))}")

            again = kfconvert.load(folder, model=blank(model), device=options.device)
            torch.testing.assert_close(call(again, inputs), call(fused, inputs))
            print("  kfconvert.load: the same outputs")
            if isinstance(model, PreTrainedModel):
                plain = AutoModel.from_pretrained(folder).to(options.device)
                torch.testing.assert_close(call(plain, inputs), call(model, inputs))
                print("  from_pretrained: the original's outputs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
