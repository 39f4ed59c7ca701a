"""Which gradients of variables the core compresses, under TensorFlow and Keras, and what it leaves behind of them.

What is left behind is found again by a variable's name, as ranks and checkpoints have it: its path in the model, and
"#2", "#3" for the next variables of the same name, in the order in which their gradients first travel.
"""
import logging
import math
import os
import weakref
import zlib
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from lightcc.compress import residuals
from lightcc.compress.choice import compression_of, too_few_to_compress
from lightcc.compress.codec import Codec, all_stats, stats
from lightcc.compress.compressors import CoreCompressor, NoneCompressor
from lightcc.core import lib
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.request import id_of

_logger = logging.getLogger("lightcc")


class Gradient(NamedTuple):
    """A dense gradient; shape and dtype are its own."""

    variable: Any  # what the framework holds, of which there is one object
    name: str      # of the variable
    shape: Sequence[int]
    dtype: str


class VariableCompression:
    """One optimizer has it, or all tapes with equal compressors. Used by one thread at a time."""

    def __init__(self, compression: CoreCompressor, process_set: ProcessSet):
        self.compression, self._process_set = compression, process_set
        self._codec = Codec(compression)
        self._labels: Dict[int, Tuple[Any, str]] = {}  # by id: a reference, and the name that is the variable's own
        self._named: Dict[str, int] = {}               # how many variables have had a name
        self._places: Dict[str, Tuple[residuals.Place, int]] = {}  # by label, where the core has it now
        self._loaded: Optional[residuals.Saved] = None  # what the core takes in with the next exchange of each tensor
        self._unwritten: Dict[str, Any] = {}            # of it, what the core has not got yet
        self._why_dense = "no gradient has travelled yet"
        self._me = 0, 1  # rank and size when gradients last travelled: state outlives the epoch

    @property
    def codec(self) -> Codec:
        return self._codec

    @property
    def is_member(self) -> bool:
        """Whether this rank takes part in what the optimizer sends."""
        return bool(self._process_set.included())

    def choose(self, gradients: Mapping[int, Gradient]) -> Dict[int, str]:
        """Which gradients of one step travel compressed, by their places, and their variables' labels.

        All ranks decide alike, by names, shapes, dtypes and rank 0's knobs.
        """
        whys = {place: self.compression.why_dense(gradient.name, gradient.shape, gradient.dtype, gradient.variable)
                for place, gradient in gradients.items()}
        wanted = {place: gradient for place, gradient in gradients.items() if not whys[place]}
        size = sum(math.prod(g.shape) * (4 if g.dtype == "float32" else 2) for g in wanted.values())
        self._why_dense = too_few_to_compress(size, filter(None, whys.values()))
        self._codec.note("", self._why_dense)
        if self._why_dense:
            return {}
        self._me = self._process_set.rank() or 0, self._process_set.size() or 1  # it is registered: it has both
        return {place: self._label(gradient) for place, gradient in wanted.items()}

    def request(self, unit: str, labels: Sequence[str], elements: Sequence[int]) -> str:
        """The name of the request in which these gradients travel. unit: what precedes it, or a group's name."""
        # Others' gradients must not be taken for those of a group that has lost a member.
        name = f"{unit}.{labels[0] if len(labels) == 1 else format(zlib.crc32('|'.join(labels).encode()), '08x')}"
        group = id_of(self._process_set)
        self._places.update({label: ((group, name, i), count)
                             for i, (label, count) in enumerate(zip(labels, elements))})
        self._write_loaded(labels)
        return name

    def _label(self, gradient: Gradient) -> str:
        key = id(gradient.variable)
        known = self._labels.get(key)
        if known is None:
            count = self._named[gradient.name] = self._named.get(gradient.name, 0) + 1
            label = gradient.name if count == 1 else f"{gradient.name}#{count}"
            me = weakref.ref(self)
            known = self._labels[key] = weakref.ref(gradient.variable, lambda _: _forget(me(), key)), label
        return known[1]

    # What is left behind

    def state(self) -> Optional[residuals.Saved]:
        """This rank's; values are numpy arrays."""
        saved = residuals.read(self._codec, {place: label for label, (place, _) in self._places.items()}, *self._me)
        if saved is None:
            return self._loaded
        saved = residuals.with_values(saved, lambda values: np.array(values, np.float32))
        if self._loaded:
            waiting = {label: tensor for label, tensor in self._loaded["tensors"].items()
                       if label not in saved["tensors"]}
            self._loaded = {**self._loaded, "tensors": waiting} if waiting else None
            saved["tensors"].update(waiting)
        return saved

    def gather(self) -> Optional[residuals.Saved]:
        """Those of all ranks, which all call this."""
        return residuals.gather(self.state(), self._process_set)

    def load(self, saved: Optional[residuals.Saved]) -> None:
        """From now on only what was saved is left behind."""
        self._codec.release()
        self._codec = Codec(self.compression, self._codec.name)
        self._loaded = saved and {**saved, "tensors": dict(saved["tensors"])}
        self._unwritten = dict(saved["tensors"]) if saved else {}
        why = residuals.missing(saved, self._process_set) if lib.initialized() else ""
        if why:
            _logger.log(logging.INFO if saved is None else logging.WARNING, "optimizer state: %s", why)
        self._write_loaded(list(self._places))

    def stats(self) -> Dict[str, Any]:
        return stats([self._codec], self._why_dense)

    def _write_loaded(self, labels: Sequence[str]) -> None:
        now = {label: self._unwritten.pop(label) for label in labels if label in self._unwritten}
        values = residuals.with_values({"tensors": now}, lambda values: np.array(values, np.float32))
        unknown = residuals.write(self._codec, self._places, values)
        if self._loaded:
            for label in unknown:
                self._loaded["tensors"].pop(label)
        if unknown:
            _logger.warning("optimizer state: what compression had left behind of %s is dropped: there is no such "
                            "gradient here.", ", ".join(unknown))


def _forget(owner: Optional[VariableCompression], key: int) -> None:
    """A variable is gone. Its label is not given again: the ranks need not notice this at the same time."""
    if owner is None:
        return
    _, label = owner._labels.pop(key)
    owner._places.pop(label, None)
    if not owner._labels:  # nothing of what is left behind can travel any more
        owner._codec.release()
        owner._codec = Codec(owner.compression, owner._codec.name)


_tapes: Dict[Any, VariableCompression] = {}  # scripts wrap a tape in every step, so the tape cannot keep anything


class WantedCompression:
    """The compression of an optimizer or of tapes: what it was given, until LIGHT_TOPK_ALLREDUCE is known.

    optimizer_class: "" for a tape. ValueError for Compression.topk or int8 with an op other than Average and Sum.
    """

    def __init__(self, compression: Any, op: int, optimizer_class: str, process_set: ProcessSet):
        self._given, self._op, self._class, self._process_set = compression, op, optimizer_class, process_set
        self._core: Optional[VariableCompression] = None
        self._resolved = False
        if isinstance(compression, CoreCompressor):
            compression_of(compression, op, "")
            if lib.initialized():
                self._resolve()  # its warning comes now

    def __reduce__(self) -> Tuple[Any, ...]:  # a copy has left nothing behind
        return WantedCompression, (self._given, self._op, self._class, self._process_set)

    @property
    def plain(self) -> Any:
        """What is done to gradients that the core does not compress."""
        return NoneCompressor if isinstance(self._given, CoreCompressor) else self._given

    def use(self, compression: Any) -> None:
        """Has another plain one from now on; a graph that is traced already keeps its own. ValueError for TopK and
        Int8, as what they leave behind belongs to one.

        >>> from lightcc.core.process_sets import global_process_set
        >>> wanted = WantedCompression(NoneCompressor, 0, "", global_process_set); wanted.use(NoneCompressor)
        """
        for one in (self._given, compression):
            if isinstance(one, CoreCompressor):
                raise ValueError(f"compression: {one} keeps what it leaves behind, so it cannot change with the level "
                                 "here. Give none, fp16, bf16 or a Compressor of your own.")
        self._given = compression

    @property
    def needs_init(self) -> bool:
        """Whether it cannot be known yet what the core compresses."""
        asked = isinstance(self._given, CoreCompressor) or os.environ.get("LIGHT_TOPK_ALLREDUCE", "0") != "0"
        return asked and not self._resolved and not lib.initialized()

    @property
    def core(self) -> Optional[VariableCompression]:
        """None: the core compresses nothing."""
        if not self._resolved and lib.initialized():
            self._resolve()
        return self._core

    def _resolve(self) -> None:
        self._resolved = True
        compression = compression_of(self._given, self._op, self._class, stacklevel=6)
        if not isinstance(compression, CoreCompressor):
            return
        if self._class:
            self._core = VariableCompression(compression, self._process_set)
            return
        self._core = _of_tapes(compression, self._process_set)


def _of_tapes(compression: CoreCompressor, process_set: ProcessSet) -> VariableCompression:
    key = _key(compression, process_set)
    if key not in _tapes:
        _tapes[key] = VariableCompression(compression, process_set)
    _tapes[key].compression = compression  # its `dense` and `loss_scale` are those of the tape of now
    return _tapes[key]


def _key(compression: CoreCompressor, process_set: ProcessSet) -> Tuple[Any, ...]:
    return (compression.kind, compression.width, compression.ratio, compression.momentum, compression.warmup_steps,
            process_set.process_set_id)


# What users call

def compression_stats(optimizer: Any = None) -> Dict[str, Any]:
    """What Compression.topk and int8 have done on this rank for an optimizer since it was made or last loaded.

    optimizer: a DistributedOptimizer, a DistributedGradientTape, or the compression that tapes were given; None: all
    that this process compresses. Returns a dict: gradient_bytes of the tensors that were exchanged compressed;
    sent_bytes to other nodes for them; dense_sent_bytes, what would have been sent without compression; ratio of these
    two, 1 if nothing was sent; density, the share of elements that were sent; residual_norm, the Euclidean norm of what
    is left behind here; route, "host", "gpu" or "nccl", as of lightcc.torch.compression_stats; dense, why gradients
    travel dense, or "". ValueError for anything else.

    >>> compression_stats()["ratio"]
    1.0
    """
    if optimizer is None:
        return all_stats()
    core = _core_of(optimizer, "compression_stats")
    return core.stats() if core else stats([], "it compresses nothing")


def compression_state(optimizer: Any) -> Optional[Dict[str, Any]]:
    """What compression has left behind on this rank, to be saved beside a checkpoint; it does not communicate.

    optimizer: as for compression_stats, between two steps. Returns a dict of plain values and float32 numpy arrays, by
    the variables' names; None if there is nothing. ValueError for anything else.

    >>> from lightcc.compress.compressors import TopK
    >>> compression_state(TopK(0.125)) is None
    True
    """
    core = _core_of(optimizer, "compression_state")
    return core.state() if core else None


def gather_residuals(optimizer: Any) -> Optional[Dict[str, Any]]:
    """compression_state of all ranks in one; all ranks of the process set call it, between two steps.

    Restores on any number of hosts and ranks. Memory on each rank: 4 bytes an element of each compressed gradient and
    node. Arguments and errors: as for compression_state.

    >>> from lightcc.compress.compressors import TopK
    >>> gather_residuals(TopK(0.125)) is None
    True
    """
    core = _core_of(optimizer, "gather_residuals")
    return core.gather() if core else None


def load_compression_state(optimizer: Any, state: Optional[Dict[str, Any]]) -> None:
    """Makes what was saved the only thing left behind; None: nothing is. What is missing begins at zero, and a line of
    the log says which share that is.

    optimizer: as for compression_state; it may have exchanged gradients already or not. state: what compression_state
    or gather_residuals has returned, in this or another process; every rank loads what it has. ValueError for anything
    else, and for a state where nothing is compressed.

    >>> from lightcc.compress.compressors import TopK
    >>> load_compression_state(TopK(0.125), None)
    """
    if state is not None and not (isinstance(state, dict) and {"ranks", "size", "tensors"} <= state.keys()):
        raise ValueError("load_compression_state: give what compression_state or gather_residuals has returned.")
    core = _core_of(optimizer, "load_compression_state", make=state is not None)
    if core is not None:
        core.load(state)
    elif state is not None:
        raise ValueError("load_compression_state: the optimizer compresses nothing, so there is no place for what was "
                         "left behind.")


def share_residuals(optimizer: Any) -> None:
    """Gives all ranks what compression has left behind on any of them, after the members of the job have changed. All
    ranks call it; nothing happens where nothing is compressed. What ranks that are gone had left behind begins at zero.

    >>> from lightcc.compress.compressors import TopK
    >>> share_residuals(TopK(0.125))
    """
    core = _core_of(optimizer, "share_residuals")
    if core is None or not core.is_member:
        return
    saved = core.gather()
    if saved:
        core.load({**saved, "size": len(saved["ranks"])})  # those that are there are all


def _core_of(thing: Any, what: str, make: bool = False) -> Optional[VariableCompression]:
    """make: also of tapes that there have not been yet."""
    if isinstance(thing, CoreCompressor):
        return (_of_tapes if make else lambda *of: _tapes.get(_key(*of)))(thing, global_process_set)
    inner = getattr(thing, "inner_optimizer", None)  # of a LossScaleOptimizer
    wanted = getattr(thing, "_wanted_compression", None) or getattr(inner, "_wanted_compression", None)
    if not isinstance(wanted, WantedCompression):
        raise ValueError(f"{what}: give a DistributedOptimizer, a DistributedGradientTape or its compression, not a "
                         f"{type(thing).__name__}.")
    return wanted.core


def parts_of(members: Sequence[int], chosen: Mapping[int, str]) -> Tuple[List[int], List[int]]:
    """The members of a unit, by their places: those that travel dense, and compressed."""
    return [i for i in members if i not in chosen], [i for i in members if i in chosen]
