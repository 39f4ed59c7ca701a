"""What a row is before it is trained: values of a counter-based generator of (seed, table, key), or one number.

A key's first value is the same on any number of ranks and in any order, so that a row needs no memory until its first
gradient. Values are drawn in csrc/embedding.
"""
import math
from dataclasses import dataclass
from typing import Tuple, Union


@dataclass(frozen=True)
class Normal:
    """Normally distributed. mean and std: of each element, in the units of the weights; std at least 0.

    Errors: ValueError for a std below 0 and for numbers that are not finite. Source: torch.nn.init.normal_.

    >>> from lightcc import embedding
    >>> embedding.Normal(0, 0.01)
    Normal(mean=0, std=0.01)
    """

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        _expect_finite(self, self.mean, self.std)
        if self.std < 0:
            raise ValueError(f"{self}: std must be at least 0.")


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed from low (which may occur) to high (which may not).

    Errors: ValueError for low > high and for numbers that are not finite. Source: torch.nn.init.uniform_.

    >>> from lightcc import embedding
    >>> embedding.Uniform(-0.05, 0.05)
    Uniform(low=-0.05, high=0.05)
    """

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _expect_finite(self, self.low, self.high)
        if self.low > self.high:
            raise ValueError(f"{self}: low must be at most high.")


@dataclass(frozen=True)
class Constant:
    """Each element is this value. Errors: ValueError if it is not finite. Source: torch.nn.init.constant_.

    >>> from lightcc import embedding
    >>> embedding.Constant(1.0)
    Constant(value=1.0)
    """

    value: float

    def __post_init__(self) -> None:
        _expect_finite(self, self.value)


@dataclass(frozen=True)
class Zeros:
    """Each element is 0. Source: torch.nn.init.zeros_.

    >>> from lightcc import embedding
    >>> embedding.Zeros()
    Zeros()
    """


Initializer = Union[Normal, Uniform, Constant, Zeros]


def parameters_of(init: Initializer) -> Tuple[str, float, float]:
    """The kind of an initializer and its two numbers, as the C API and a checkpoint have them.

    Errors: TypeError for anything but an initializer.

    >>> from lightcc.embedding.initializers import Constant, parameters_of
    >>> parameters_of(Constant(2))
    ('constant', 2.0, 0.0)
    """
    if isinstance(init, Normal):
        return "normal", float(init.mean), float(init.std)
    if isinstance(init, Uniform):
        return "uniform", float(init.low), float(init.high)
    if isinstance(init, Constant):
        return "constant", float(init.value), 0.0
    if isinstance(init, Zeros):
        return "zeros", 0.0, 0.0
    raise TypeError(f"init={init!r}: give Normal(mean, std), Uniform(low, high), Constant(value) or Zeros().")


def _expect_finite(init: Initializer, *numbers: float) -> None:
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{init}: its numbers must be finite.")
