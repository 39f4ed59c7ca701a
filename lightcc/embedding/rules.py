"""How a row takes its gradient: what is fixed when a rule is attached to a table, and what each update brings along."""
import math
from dataclasses import dataclass
from typing import Any, Dict, Mapping

# Each rule's slots, which are as wide as a row but those of _ONE_NUMBER; and its numbers beside lr.
_SLOTS = {"sgd": (), "adagrad": ("v",), "rowwise_adagrad": ("v",), "lazy_adam": ("m", "v"), "sparse_adam": ("m", "v"),
          "group_adagrad": ("v", "z"), "group_adam": ("m", "v", "z")}
_ONE_NUMBER = {"rowwise_adagrad"}
NUMBERS = ("lr", "beta1", "beta2", "eps", "l1", "l2", "l21")


@dataclass(frozen=True)
class Rule:
    """kind: "sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "sparse_adam", "group_adagrad" or "group_adam".

    initial: V of Adagrad and GroupAdagrad at a row's birth. terms: of SparseAdam's sum; 0: all of them.
    Errors: ValueError for another kind. Source of the rules: lightcc.torch.embedding.optimizers.

    >>> Rule("adagrad", initial=0.1).slots(16)
    {'v': 16}
    """

    kind: str
    initial: float = 0.0
    terms: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _SLOTS:
            raise ValueError(f"there is no rule {self.kind!r}; there are {', '.join(_SLOTS)}.")

    def slots(self, dim: int) -> Dict[str, int]:
        """How many numbers of each slot a row of `dim` weights has."""
        return {name: 1 if self.kind in _ONE_NUMBER else dim for name in _SLOTS[self.kind]}

    def numbers(self, options: Mapping[str, Any]) -> Dict[str, float]:
        """Of an optimizer's options, those that an update brings along. ValueError for one that is not finite.

        >>> Rule("lazy_adam").numbers({"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8})["beta2"]
        0.999
        """
        given = dict(options)
        given["beta1"], given["beta2"] = given.pop("betas", (0.0, 0.0))
        numbers = {name: float(given.get(name, 0.0)) for name in NUMBERS}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}={value!r} is not finite.")
        return numbers
