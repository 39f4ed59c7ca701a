"""What the examples of trainers share: data, a small net, a curve.

The task: is a line Python code, or is it prose? The data, tens of thousands of lines, are the code and the docstrings
of the standard library of the Python that runs the example. Nothing is downloaded.
"""
import argparse
import ast
import sysconfig
from pathlib import Path
from typing import Dict, Set, Tuple

import torch

LENGTH = 64    # characters of a line that a model sees
ALPHABET = 128  # of ASCII; 0 is padding
BATCH = 32     # lines a rank and step
CODE, PROSE = 0, 1


def lines_of(source):
    """The lines of a module, each with its class; those that are short, doubtful or comments are left out."""
    prose: Set[int] = set()  # numbers of lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        line = line.strip()
        if len(line) >= 12 and line.isascii() and not line.startswith("#") and '"""' not in line:
            yield line, PROSE if number in prose else CODE


def load(most):
    """(ids [n, LENGTH] of int64, classes [n] of int64): a quarter of the lines for tests, the others for training.

    most: of how many lines, as many of each class.
    """
    found: Tuple[Dict[str, None], Dict[str, None]] = ({}, {})  # each line once, in order
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for line, of in lines_of(path.read_text(encoding="utf-8", errors="replace")):
            found[of][line] = None
    each = min(most // 2, *map(len, found))
    lines = [(line, of) for of in (CODE, PROSE) for line in list(found[of])[:each]]
    ids, classes = torch.zeros(len(lines), LENGTH, dtype=torch.long), torch.tensor([of for _, of in lines])
    for row, (line, _) in zip(ids, lines):
        codes = torch.tensor([ord(c) for c in line[:LENGTH]])
        row[:len(codes)] = codes
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(1))  # the same on all ranks
    test, train = order[:len(lines) // 4], order[len(lines) // 4:]
    return (ids[train], classes[train]), (ids[test], classes[test])


class Net(torch.nn.Module):
    """Characters, what stands beside each, and whether it is anywhere in the line."""

    def __init__(self, width=64):
        super().__init__()
        self.characters = torch.nn.Embedding(ALPHABET, width)
        self.beside = torch.nn.Conv1d(width, width, kernel_size=5, padding=2)
        self.of = torch.nn.Linear(width, 2)

    def forward(self, ids):
        beside = torch.relu(self.beside(self.characters(ids).transpose(1, 2)))
        return self.of(beside.amax(2))


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20000, help="at most, of both classes; default %(default)s")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training set; default %(default)s")
    parser.add_argument("--png", metavar="FILE", help="gets the curve of the loss; needs matplotlib")
    return parser.parse_args()


def report(name, losses, accuracy, ranks, png=None):
    """Rank 0's last words. losses: of its steps."""
    print(f"{name}: {accuracy:.1%} of the test lines are told apart, after {len(losses)} steps on {ranks} rank(s)")
    if png:
        import matplotlib
        matplotlib.use("Agg")  # draws into files, needs no screen
        from matplotlib import pyplot
        figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
        axes.plot(range(1, len(losses) + 1), losses)
        axes.set(xlabel="step", ylabel="loss of rank 0's batch", ylim=(0, None), title=f"{name}: code or prose?")
        figure.savefig(png, dpi=100)
