import importlib.machinery
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_HERE = Path(__file__).parents[1]


def load_digits():
    """As scikit-learn's own, from its file."""
    table = _table("digits.csv.gz", ",")
    data, target = table[:, :-1], table[:, -1].astype(int)
    return SimpleNamespace(data=data, images=data.reshape(-1, 8, 8), target=target)


def load_diabetes(return_X_y, scaled):
    """As scikit-learn's own with both True."""
    assert return_X_y and scaled
    data = _table("diabetes_data_raw.csv.gz", None)
    return (data - data.mean(axis=0)) / data.std(axis=0) / len(data) ** 0.5, _table("diabetes_target.csv.gz", None)


def _table(name, delimiter):
    others = [folder for folder in sys.path if Path(folder) != _HERE]
    found = importlib.machinery.PathFinder.find_spec("sklearn", others)
    folder = Path(found.submodule_search_locations[0])
    return np.loadtxt(folder / "datasets" / "data" / name, delimiter=delimiter)
