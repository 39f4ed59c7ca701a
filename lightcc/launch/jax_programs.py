"""lightccrun --jax: programs of JAX need not import lightcc.jax. Each Python hears of it by a folder at the head of
PYTHONPATH (jax_path/sitecustomize.py)."""
import os
from collections.abc import Mapping

from lightcc.launch.local import pythonpath_setting

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "jax_path")


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """settings: what the ranks get otherwise."""
    path = {**os.environ, **pythonpath_setting(), **settings}.get("PYTHONPATH", "")
    others = path.split(os.pathsep) if path else []  # an empty name among others means the working directory
    return {"LIGHTCC_JAX": "1", "PYTHONPATH": os.pathsep.join([FOLDER, *(one for one in others if one != FOLDER)])}
