"""What a compressor is, for every framework, and those that the core does itself. Names as in Horovod's modules
compression; TopK, Int8 and Int4 are lightcc's own (docs/compression.md)."""
import math
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple, Union

from lightcc.core import lib

Dense = Optional[Callable[[str, Any], bool]]


class Compressor:
    """The interface of a compressor: two static methods. The ranks must make tensors of equal shape and dtype."""

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        """Returns the tensor to send, and what decompress needs to undo it.

        >>> NoneCompressor.compress("a tensor")
        ('a tensor', None)
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undoes compress.

        >>> NoneCompressor.decompress(*NoneCompressor.compress("a tensor"))
        'a tensor'
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are.

    >>> NoneCompressor.compress("a tensor")
    ('a tensor', None)
    """

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


_LEAST_BYTES = 16 << 10  # below, one message costs as much as another
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def some(reasons: Iterable[str]) -> str:
    """The first three of them, and how many more there are.

    >>> some(["a", "b", "c", "d", "e"])
    'a; b; c; and 2 more'
    """
    reasons = [*reasons]
    return "; ".join(reasons[:3] + ([f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []))


class CoreCompressor(NoneCompressor):
    """A compressor of which the core does the work, between hosts, and keeps what is left behind: TopK, Int8, Int4.

    A value: comparable, and as picklable as `dense` and `loss_scale` are. What is left behind belongs to who exchanges
    gradients with it: each optimizer and tape has its own, and so has each such object by itself for `allreduce`s.

    loss_scale: a positive float, or a function without arguments that returns it (scaler.get_scale of torch's
    GradScaler): gradients are so many times too large. What is left behind is kept in units without it, so it may
    change from step to step. It must be the same on all ranks. Default 1; ValueError for what cannot be one.

    >>> compression = TopK(ratio=0.05); compression.loss_scale = 1024.0; compression.scale()
    1024.0
    """

    kind = lib.CODEC_NONE
    width = lib.FLOAT32  # the dtype in which values travel
    ratio, momentum, warmup_steps = 1.0, 0.0, 0

    def __init__(self, dense: Dense = None):
        if dense is not None and not callable(dense):
            raise ValueError(f"dense={dense!r}: give a function of a name and a tensor, or None.")
        self.dense = dense
        self.loss_scale = 1.0

    @property
    def loss_scale(self) -> Union[float, Callable[[], float]]:
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: Union[float, Callable[[], float]]) -> None:
        self._loss_scale = scale if callable(scale) else _positive(scale)

    def scale(self) -> float:
        """The loss scale of this step.

        >>> Int8().scale()
        1.0
        """
        return _positive(self._loss_scale()) if callable(self._loss_scale) else self._loss_scale

    def is_compressed(self, name: str, shape: Sequence[int], dtype: str, tensor: Any = None) -> bool:
        """Whether a gradient travels compressed; all others travel dense, as if there were no compressor.

        It does if it is float16, bfloat16 or float32, has two dimensions or more (so no biases, no norms) and at least
        16 KiB, its name does not contain "embed", in any case, and `dense` does not say otherwise. Sparse gradients
        never do, which their framework knows.
        dtype: its name. tensor: for `dense`.

        >>> compression = TopK(dense=lambda name, tensor: name.startswith("head."))
        >>> compression.is_compressed("conv.weight", (64, 64), "float32")
        True
        >>> compression.is_compressed("conv.bias", (4096,), "float32")
        False
        >>> compression.is_compressed("head.weight", (64, 64), "float32")
        False
        """
        return not self.why_dense(name, shape, dtype, tensor)

    def why_dense(self, name: str, shape: Sequence[int], dtype: str, tensor: Any = None) -> str:
        """Why such a gradient travels dense; "" if it travels compressed. Arguments as of is_compressed.

        >>> Int8().why_dense("conv.bias", (4096,), "float32")
        'conv.bias has fewer than two dimensions'
        """
        if len(shape) < 2:
            return f"{name} has fewer than two dimensions"
        if dtype not in _ELEMENT_BYTES:
            return f"{name} is of dtype {dtype}"
        if _ELEMENT_BYTES[dtype] * math.prod(shape) < _LEAST_BYTES:
            return f"{name} has fewer than {_LEAST_BYTES} bytes"
        if "embed" in name.lower():
            return f"{name} has 'embed' in its name"
        return f"dense= says so of {name}" if self.dense is not None and self.dense(name, tensor) else ""

    def options(self) -> Dict[str, Any]:
        """What it was made with.

        >>> Int8().options()
        {'dense': None}
        """
        return {"dense": self.dense}

    def __eq__(self, other: Any) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self.options(), self._loss_scale) == (other.options(), other._loss_scale)

    def __hash__(self) -> int:
        return hash((self.kind, self.width, self.ratio, self.momentum, self.warmup_steps))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"Compression.{type(self).__name__.lower()}({options})"

    def __getstate__(self) -> Dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "codec"}  # see lightcc.compress.codec


class TopK(CoreCompressor):
    """Between hosts only the largest elements of a gradient travel; what does not is added to the next step's.

    ratio: the share of the elements that travels, of each tensor. fp16: their values as float16, else float32.
    warmup_steps: so many exchanges of each tensor go from dense to `ratio` in five stages, of ratio^(1/5), ratio^(2/5)
    and so on. momentum_correction: of the optimizer's momentum (0.9), if what is left behind shall gather momentum too
    (the optimizer's own is then 0). dense(name, tensor): true for gradients that shall travel dense.
    Errors: ValueError for a ratio outside (0, 1], a momentum outside [0, 1), fewer than 0 steps.
    Sources: Shi et al., MLSys 2021 (Top-K inside a hierarchy); Stich et al., NeurIPS 2018 (error feedback); Lin et al.,
    ICLR 2018 (DGC: warm-up, momentum correction).

    >>> TopK(ratio=0.01, fp16=True) == TopK(fp16=True)
    True
    """

    kind = lib.CODEC_TOPK

    def __init__(self, ratio: float = 0.01, fp16: bool = False, warmup_steps: int = 0,
                 momentum_correction: Optional[float] = None, dense: Dense = None):
        super().__init__(dense)
        self.ratio = _number("ratio", ratio)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: give the share of the elements that travels, above 0 and at most 1.")
        self.momentum = 0.0 if momentum_correction is None else _number("momentum_correction", momentum_correction)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum_correction={momentum_correction!r}: give the optimizer's momentum, at least 0 "
                             "and below 1, or None.")
        self.warmup_steps = int(_number("warmup_steps", warmup_steps))
        if self.warmup_steps != warmup_steps or not 0 <= self.warmup_steps < 1 << 31:
            raise ValueError(f"warmup_steps={warmup_steps!r}: give a number of steps, 0 or more.")
        self.fp16, self.momentum_correction = bool(fp16), momentum_correction
        self.width = lib.FLOAT16 if self.fp16 else lib.FLOAT32

    def options(self) -> Dict[str, Any]:
        return {"ratio": self.ratio, "fp16": self.fp16, "warmup_steps": self.warmup_steps,
                "momentum_correction": self.momentum_correction, "dense": self.dense}


class Int8(CoreCompressor):
    """Between hosts gradients travel as 8-bit integers with scales; what rounding takes is added to the next step's.

    dense(name, tensor): true for gradients that shall travel dense. ValueError if it is no function.

    >>> Int8()
    Compression.int8(dense=None)
    """

    kind = lib.CODEC_INT8
    width = lib.INT8


class Int4(CoreCompressor):
    """Between hosts gradients travel as 4-bit integers with scales; what rounding takes is added to the next step's.

    dense(name, tensor): true for gradients that shall travel dense. ValueError if it is no function.

    >>> Int4()
    Compression.int4(dense=None)
    """

    kind = lib.CODEC_INT4
    width = lib.INT8  # two in a byte


def refuse_core(compression: Any, what: str) -> None:
    """ValueError if it is TopK, Int8 or Int4, which `what` cannot use.

    >>> refuse_core(NoneCompressor, "reducescatter")
    """
    if isinstance(compression, CoreCompressor):
        raise ValueError(f"{what} cannot use {compression}, which is for optimizers, tapes and named allreduces.")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={value!r}: give a number.") from None


def _positive(scale: Any) -> float:
    value = _number("loss_scale", scale)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"loss_scale={scale!r}: give a positive number, or a function that returns one.")
    return value


def topk(ratio: float = 0.01, fp16: bool = False, warmup_steps: int = 0, momentum_correction: Optional[float] = None,
         dense: Dense = None) -> TopK:
    """Between hosts only the share `ratio` of a gradient's elements travels, those that are largest in magnitude.

    What does not travel is kept, and added to the next step's gradient (error feedback), so nothing is lost. For
    optimizers, tapes and named allreduces with op Average or Sum. On one host, or where it would not be fewer bytes,
    values travel dense.
    ratio: of each tensor, in (0, 1]. fp16: values travel as float16, else as float32. warmup_steps: exchanges in which
    each tensor goes from dense to ratio. momentum_correction: momentum of what is kept, in [0, 1), in place of the
    optimizer's. dense(name, tensor): true for what shall travel dense, beside biases, norms, embeddings and what is
    small (lightcc.compress.compressors.CoreCompressor.is_compressed).
    ValueError for arguments that are none of this. More, and sources: docs/compression.md.

    >>> topk(ratio=0.02, fp16=True, warmup_steps=100).ratio
    0.02
    """
    return TopK(ratio, fp16, warmup_steps, momentum_correction, dense)


def int8(dense: Dense = None) -> Int8:
    """Between hosts gradients travel as 8-bit integers, a quarter of float32's bytes.

    What rounding takes is kept, and added to the next step's gradient. For the same calls as Compression.topk.
    dense(name, tensor): true for what shall travel dense, as for Compression.topk.

    >>> int8()
    Compression.int8(dense=None)
    """
    return Int8(dense)


def int4(dense: Dense = None) -> Int4:
    """Between hosts gradients travel as 4-bit integers, a seventh of float32's bytes.

    64 elements share a scale, their largest magnitude / 7. What rounding takes is kept, and added to the next step's
    gradient: more than of int8, so it is for what is averaged over many steps, such as DiLoCo's outer gradients. For
    the same calls as Compression.topk. dense(name, tensor): true for what shall travel dense, as for Compression.topk.

    >>> int4()
    Compression.int4(dense=None)
    """
    return Int4(dense)
