"""What elastic_training.py learns: the first of the handwritten digits that come with scikit-learn, by a small net; and
the same training in one process, by plain PyTorch."""
import importlib.util
from pathlib import Path

import numpy as np
import torch

SAMPLES, BATCH = 48, 2


def _digits():
    """Not by load_digits(): to import scikit-learn takes each worker half a second."""
    folder = Path(importlib.util.find_spec("sklearn").submodule_search_locations[0])
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",", max_rows=SAMPLES)
    return torch.tensor(table[:, :-1] / 16, dtype=torch.float32), torch.tensor(table[:, -1], dtype=torch.int64)


_images, _labels = _digits()


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10))


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)


def loss(net, samples):
    return torch.nn.functional.cross_entropy(net(_images[samples]), _labels[samples])


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def trained(seed, batches):
    """The weights after these batches, each a list of the samples of each rank."""
    net = network(seed)
    steps = optimizer(net)
    for batch in batches:
        steps.zero_grad()
        for samples in batch:
            (loss(net, samples) / len(batch)).backward()
        steps.step()
    return weights(net)
