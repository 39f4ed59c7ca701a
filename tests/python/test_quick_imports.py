"""tests/quick_imports: programs compute what they compute without it, and import less."""
import os
import subprocess
import sys

import pytest
import torch  # noqa: F401  so that the file is left out where there is none

PROGRAM = """
import sys
import torch
from sklearn.datasets import load_diabetes, load_digits
x, y = load_diabetes(return_X_y=True, scaled=True)
print(x.shape, abs(x).sum().round(6), y.dtype, y.sum())
digits = load_digits()
print(digits.data.dtype, digits.data.sum(), digits.images.shape, digits.target.dtype, digits.target[-5:])
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
    torch.manual_seed(1)
    net = torch.nn.Linear(64, 10)
    optimizer = kind(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.tensor(digits.data[:50]).float()), torch.tensor(digits.target[:50])
                                          ).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    print(kind.__name__, net.weight.double().sum().item(), net.weight.requires_grad, net.weight.grad_fn)
print("torch._dynamo" in sys.modules, "scipy" in sys.modules, file=sys.stderr)
"""


def run(folders):
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_programs_compute_the_same_and_import_less():
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    out, imported = run(folders)
    assert imported == "False False"
    assert run([folder for folder in folders if os.path.basename(folder) != "quick_imports"]) == (out, "True True")
