"""What DistributedOptimizer is given: checked, with errors that say what it should be."""
from typing import Any, Dict, List, Tuple

import torch


def names_of(named_parameters, param_groups: List[Dict[str, Any]]) -> Dict[torch.Tensor, str]:
    """The name of each parameter."""
    parameters = [p for group in param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}.{j}" for i, group in enumerate(param_groups)
                for j, p in enumerate(group["params"])}
    named: List[Tuple[str, torch.Tensor]] = list(named_parameters)
    if any(not isinstance(entry, tuple) or len(entry) != 2 for entry in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}.")
    result = {parameter: name for name, parameter in named}
    unnamed = sum(p not in result for p in parameters)
    if unnamed:
        raise ValueError(f"named_parameters was specified, but {unnamed} of the optimizer's parameters are not named. "
                         "Python object ids do not match: the optimizer's parameters may not be those of the model.")
    return result
