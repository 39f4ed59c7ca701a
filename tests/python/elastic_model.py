"""What elastic_training.py learns with PyTorch: the first of the handwritten digits that come with scikit-learn, by a
small net; and the same training in one process, by plain PyTorch."""
import torch
from sklearn.datasets import load_digits

SAMPLES = 48


def _digits():
    digits = load_digits()
    return (torch.tensor(digits.data[:SAMPLES] / 16, dtype=torch.float32),
            torch.tensor(digits.target[:SAMPLES], dtype=torch.int64))


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
