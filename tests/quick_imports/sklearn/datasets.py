import importlib.machinery
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_HERE = Path(__file__).parents[1]


def load_digits():
    """As scikit-learn's own, from its file."""
    others = [folder for folder in sys.path if Path(folder) != _HERE]
    found = importlib.machinery.PathFinder.find_spec("sklearn", others)
    folder = Path(found.submodule_search_locations[0])
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    data, target = table[:, :-1], table[:, -1].astype(int)
    return SimpleNamespace(data=data, images=data.reshape(-1, 8, 8), target=target)
