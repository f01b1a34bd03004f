"""Write the list of operators in docs/operators.md from their declarations.

    PYTHONPATH=. python scripts/list_operators.py

A test compares the two.
"""

from pathlib import Path

from kfconvert.ops.declaration import GROUPS, OPERATORS

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
BEGIN, END = "<!-- operators -->\n", "<!-- end of operators -->\n"
TITLES = {
    "elementwise": "element by element",
    "norm": "norms",
    "reduction": "rows and losses",
    "attention": "attention",
    "block": "blocks",
    "image": "images and integers",
    "series": "windows",
    "optimizer": "optimizers",
}


def table() -> str:
    """The operators by group; those that call others, ours or PyTorch's, after those with kernels of their own."""
    lines = ["| | with compiled kernels | calls other operators, or PyTorch's |", "|---|---|---|"]
    for group in GROUPS:
        members = {name: operator for name, operator in OPERATORS.items() if operator.group == group}
        called = sorted(name for name, operator in members.items() if operator.runs is not None)
        own = sorted(members.keys() - called)
        lines.append(f"| {TITLES[group]} | {_names(own)} | {_names(called)} |")
    return "\n".join(lines) + "\n"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
