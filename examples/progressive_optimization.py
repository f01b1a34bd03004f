"""From plain PyTorch to a kernel, level by level, and what kfconvert does of that by itself.

    python examples/progressive_optimization.py [LESSON ...] [--small] [--device cuda] [--plot levels.png]

You learn what each level costs and brings: elementary operations, PyTorch's operators for several of them, TorchScript,
torch.compile, Triton, CUDA or C++, for add_mul_exp, layer_norm, linear_gelu, attention and transformer_block. Each is
checked against float64; a level that this device cannot run is named with the reason. At the end a transformer block of
plain PyTorch is converted: the same steps, found and measured by kfconvert.
"""

import levels
import torch
from rich.console import Console
from shared import converted, options_of
from torch import nn


class Block(nn.Module):
    """The block of the last lesson with weights of its own. (batch, length, width) -> the same"""

    def __init__(self, heads, weights):
        super().__init__()
        self.heads = heads
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        return levels.lesson("transformer_block").operators(x, self.heads, *self.weights)


def main(argv=None):
    parser = options_of(__doc__)
    parser.add_argument("lessons", nargs="*", metavar="LESSON", help=f"of {', '.join(levels.NAMES)}  [default: all]")
    parser.add_argument("--plot", metavar="FILE", help="write a chart of the times there, a PNG; needs matplotlib")
    options = parser.parse_args(argv)
    if set(options.lessons) - set(levels.NAMES):
        parser.error(f"there are the lessons {', '.join(levels.NAMES)}")
    size, console = "small" if options.small else "full", Console()
    results = []
    for name in options.lessons or levels.NAMES:
        results.append(levels.run(name, options.device, size))
        console.print(levels.table(results[-1]))
    if options.plot:
        levels.plot(results, options.plot)

    torch.manual_seed(0)
    lesson = levels.lesson("transformer_block")
    x, heads, *weights = lesson.inputs(torch.randn, **lesson.sizes[size])
    block = Block(heads, weights).eval().to(options.device)
    converted("the block, converted", block, x.to(options.device), options.small)
    problems = [problem for result in results for problem in result.problems]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
