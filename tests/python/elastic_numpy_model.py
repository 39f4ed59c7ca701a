"""What elastic_training.py learns with NumPy: the digits of elastic_model.py, by one layer; and the same training in
one process."""
import numpy as np
from sklearn.datasets import load_digits

SAMPLES = 48
RATE, MOMENTUM = 0.1, 0.5
_digits = load_digits()
_images, _labels = _digits.data[:SAMPLES] / 16, _digits.target[:SAMPLES]


def network(seed):
    draw = np.random.default_rng(seed)
    return [draw.uniform(-0.1, 0.1, (64, 10)), draw.uniform(-0.1, 0.1, 10)]


def gradients(model, samples):
    """Of the mean cross-entropy of these samples."""
    weight, bias = model
    scores = _images[samples] @ weight + bias
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[range(len(samples)), _labels[samples]] -= 1
    shares /= len(samples)
    return [_images[samples].T @ shares, shares.sum(axis=0)]


def stepped(model, momentum, reduced):
    momentum = [MOMENTUM * old + gradient for old, gradient in zip(momentum, reduced)]
    return [part - RATE * change for part, change in zip(model, momentum)], momentum


def weights(model):
    return np.concatenate([part.ravel() for part in model]).tolist()


def trained(seed, batches):
    """The weights after these batches, each a list of the samples of each rank."""
    model = network(seed)
    momentum = [np.zeros_like(part) for part in model]
    for batch in batches:
        of_ranks = [gradients(model, samples) for samples in batch]
        model, momentum = stepped(model, momentum, [sum(parts) / len(batch) for parts in zip(*of_ranks)])
    return weights(model)
