"""Mixed precision that switches while training goes on, for PyTorch: `hvd.amp` of `import lightcc.torch as hvd`.

A policy says before each step what it computes in, all ranks do so in the same step, and torch's autocast and
GradScaler do the rest. docs/amp.md tells how it is used.
"""
import contextlib
import warnings
import weakref
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from lightcc.amp import (
    Always,
    AnyOf,
    History,
    HoldAfterLearningRateChange,
    OnPlateau,
    OnSpike,
    Policy,
    State,
    Switch,
    Warmup,
)
from lightcc.amp.agreement import Agreement
from lightcc.amp.controller import Controller
from lightcc.core import lib, ops
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.wrapper_arguments import stays_here
from lightcc.core.wrapper_class import is_made_with
from lightcc.torch import grad_scaler
from lightcc.torch.compiling import keep_out
from lightcc.torch.elastic.state import StateDictHandler, register_own
from lightcc.torch.optimizer import _DistributedOptimizer

__all__ = ["Always", "AnyOf", "History", "HoldAfterLearningRateChange", "MixedPrecision", "OnPlateau", "OnSpike",
           "Policy", "State", "Switch", "Warmup"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ON_GPU = "it is for NVIDIA GPUs"


class MixedPrecision:
    """Runs each step of a training in the precision that a policy chooses, the same one on all ranks.

    optimizer: DistributedOptimizer, or that of a model in a DistributedDataParallel. policy: of lightcc.amp.policy, or
    a subclass of Policy; the levels that it may choose are equal on all ranks. device_type: "cuda" or "cpu", default
    that of the parameters. dtype: torch.bfloat16 (default) or torch.float16, what policies call "low". clip: the
    gradients' largest norm, as for torch.nn.utils.clip_grad_norm_; None: any. Those of register_local_var are clipped
    by a norm of their own. norm: whether policies see the norm, that of the gradients that all ranks share.
    context: for the level fp8 a function that returns a context manager, say
    `lambda: transformer_engine.pytorch.fp8_autocast(enabled=True)`; the rest of such a step is in bfloat16. scaler: a
    GradScaler for the level float16, default torch.amp.GradScaler(device_type); nobody else may use it. compression: a
    dict, by level, what gradients are on the wire, for DistributedOptimizer.use_compression; levels that are not in it
    have that of the optimizer. process_set: of the model in a DistributedDataParallel, as in its ddp.Options; a
    DistributedOptimizer has its own.

    A step is: forward and loss inside `with precision:`; precision.backward(loss); precision.step(), which stands for
    optimizer.step(). With backward_passes_per_step the first two come so often. In float16 the loss is scaled, and a
    step that overflows is left out, on all ranks; across steps of other levels the scale stays. The level tf32 sets
    torch's flags until the step is over, and where a policy has it float32 clears them; else they stay as they are. The
    loss of a step travels beside its gradients, and policies see its mean over the ranks one step later.
    state_dict() belongs into a checkpoint; TorchState(..., precision=precision) takes it from world to world.

    Errors: ValueError for a level that the device lacks, a model that was cast to half precision, a loss that is no
    scalar, or is NaN in the first step (on all ranks); for a GradScaler that is given the optimizer beside this.
    RuntimeError for a policy that raises, and for optimizer.step(). Those of DistributedOptimizer.

    >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> precision = MixedPrecision(optimizer, Warmup(1))
    >>> for step in range(3):
    ...     optimizer.zero_grad()
    ...     with precision:
    ...         output = model(torch.ones(1, 2))
    ...     precision.backward(output.float().sum()); precision.step(); print(precision.level, output.dtype)
    float32 torch.float32
    bfloat16 torch.bfloat16
    bfloat16 torch.bfloat16
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: Policy, device_type: Optional[str] = None,
                 dtype: torch.dtype = torch.bfloat16, clip: Optional[float] = None, norm: bool = False,
                 context: Optional[Callable[[], ContextManager[Any]]] = None, scaler: Any = None,
                 compression: Optional[Mapping[str, Any]] = None, process_set: ProcessSet = global_process_set):
        self._optimizer: Any = optimizer
        self._clip, self._norm, self._context = clip, norm, context
        self._is_distributed = is_made_with(_DistributedOptimizer, optimizer)
        self._device_type = device_type or self._parameters()[0].device.type
        low = next((level for level, its in _DTYPES.items() if its == dtype), None)
        if low is None:
            raise ValueError(f"MixedPrecision: dtype={dtype} must be torch.bfloat16 or torch.float16.")
        if any(parameter.dtype in _DTYPES.values() for parameter in self._parameters()):
            raise ValueError("MixedPrecision: the model was cast to half precision, so its weights have lost what full "
                             "precision would need, and no policy can have it back. Leave model.bfloat16() or "
                             "model.half() out: in mixed steps autocast casts what is computed with.")
        if self._is_distributed:
            if process_set not in (global_process_set, optimizer.process_set):
                raise ValueError(f"MixedPrecision: process_set={process_set}, and that of the DistributedOptimizer, "
                                 f"which counts, is {optimizer.process_set}. Leave it out.")
            process_set = optimizer.process_set
        self._controller = Controller(policy, low, _available(self._device_type, context), "MixedPrecision",
                                      process_set, _OnGpu if self._device_type == "cuda" else Agreement, self)
        self._compression = dict(compression or {})
        for level in self._compression.keys() - {*self._controller.levels}:
            raise ValueError(f"MixedPrecision: compression has {level!r}, and the policy's levels are "
                             f"{', '.join(self._controller.levels)}.")
        if self._compression and not self._is_distributed:
            raise ValueError("MixedPrecision: compression= is for a DistributedOptimizer; a DistributedDataParallel "
                             "has that of ddp.Options, which stays.")
        self._scaler: Any = None
        if "float16" in self._controller.levels:
            self._scaler = scaler or torch.amp.GradScaler(self._device_type)
        self._flags = _flags() if "tf32" in self._controller.levels else []
        self._flags_before: Sequence[Any] = ()
        self._losses: List[Any] = []    # of the passes of the step that is running
        self._entered: List[ContextManager[Any]] = []
        self._stepping = self._stepped_outside = self._has_local = False
        self._local_of: Tuple[int, ...] = ()  # when _has_local was agreed
        grad_scaler.reduce_first(self)  # which then asks _before_grad_scaler
        optimizer.register_step_post_hook(_Seen(self))

    # What users call

    @property
    def level(self) -> str:
        """The level of the step that is running, or of the last one."""
        return self._controller.level

    @property
    def scaler(self) -> Any:
        """The GradScaler of the level float16, None without: for its get_scale()."""
        return self._scaler

    def __enter__(self) -> "MixedPrecision":
        if self._stepped_outside:
            raise RuntimeError("MixedPrecision: optimizer.step() was called. Call precision.step() in its place, which "
                               "calls it; else no step ends here, and the level stays for ever.")
        is_new = not self._controller.running
        level = self._controller.begin()
        if is_new and self._compression:
            own = self._optimizer._compression
            self._optimizer.use_compression(self._compression.get(level, own))
        self._set_flags(level)
        is_mixed = level in ("bfloat16", "float16", "fp8")
        contexts: List[ContextManager[Any]] = []
        if is_mixed or _autocast_is_on(self._device_type):  # of a program that has entered it
            dtype = _DTYPES.get(level, torch.bfloat16)
            contexts.append(torch.autocast(self._device_type, dtype=dtype, enabled=is_mixed))
        if level == "fp8":
            assert self._context is not None  # without it the level is not available
            contexts.append(self._context())
        for context in contexts:
            context.__enter__()
            self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__(*error)
        if error[0] is not None:
            self._restore_flags()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), scaled if the step is in float16. ValueError for a loss that is no scalar."""
        if not self._controller.running:
            raise RuntimeError("MixedPrecision: backward() comes after `with precision:` of the same step.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"MixedPrecision: the loss is {what}; give a tensor with one element, say loss.mean().")
        self._losses.append(loss.detach().reshape(()))
        if len(self._losses) == self._passes():
            self._send_loss()
        (self._scaler.scale(loss) if self._is_scaled() else loss).backward(**options)

    def step(self) -> None:
        """Makes the optimizer's step, unscaled and clipped; the step of the training is over. Errors as of
        optimizer.step(), and RuntimeError without a backward before."""
        if not self._losses:
            raise RuntimeError("MixedPrecision: step() comes after backward(loss) of the same step.")
        self._send_loss()
        self._stepping = True
        try:
            norm, overflow = self._scaled_step() if self._is_scaled() else (self._plain_step(), None)
        finally:
            self._stepping = False
            self._restore_flags()
        self._losses.clear()
        self._controller.end(norm, overflow)
        self._controller.settle()  # it has come meanwhile, beside the gradients

    def set_epoch(self, epoch: int) -> None:
        """Tells policies which epoch it is."""
        self._controller.epoch = epoch

    def history(self) -> History:
        """How many steps were in each level, and where the level changed and why.

        >>> model = torch.nn.Linear(2, 1)
        >>> precision = MixedPrecision(torch.optim.SGD(model.parameters(), lr=0.1), Always("float32"))
        >>> with precision: loss = model(torch.ones(1, 2)).sum()
        >>> precision.backward(loss); precision.step(); precision.history()
        History(steps={'float32': 1}, switches=[Switch(step=0, level='float32', reason='Always says so')])
        """
        return self._controller.history()

    def state_dict(self) -> Dict[str, Any]:
        """The state of the policy and of the loss scale, between two steps."""
        return {"controller": self._controller.state_dict(),
                "scaler": None if self._scaler is None else self._scaler.state_dict()}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on from there. ValueError if it is of another policy."""
        self._controller.load_state_dict(state["controller"])
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self._losses.clear()
        self._stepped_outside = False

    # The rest

    def _parameters(self) -> List[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _passes(self) -> int:
        return self._optimizer.backward_passes_per_step if self._is_distributed else 1

    def _is_scaled(self) -> bool:
        return self._controller.level == "float16"

    def _send_loss(self) -> None:
        """Once a step."""
        if self._controller.voted:
            return
        loss = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).mean()
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._controller.loss_known(loss.item() if self._device_type == "cpu" else loss, rates)

    def _plain_step(self) -> Optional[float]:
        if not self._clips():
            self._optimizer.step()
            return None
        if not self._is_distributed:
            norm = self._clipped()
            self._optimizer.step()
            return norm
        self._optimizer.synchronize()
        norm = self._clipped()
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        return norm

    def _scaled_step(self) -> Tuple[Optional[float], bool]:
        self._agree_on_local()
        norm, scale = None, self._scaler.get_scale()
        if self._clips():
            self._scaler.unscale_(self._optimizer)
            norm = self._clipped()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        overflow = self._scaler.get_scale() < scale
        return None if overflow else norm, overflow

    def _clips(self) -> bool:
        return self._norm or self._clip is not None

    def _clipped(self) -> Optional[float]:
        """The norm of the gradients that all ranks have. Those that stay on this rank have a norm of their own, as they
        must not change what all share."""
        local = self._optimizer._local if self._is_distributed else {}
        largest = float("inf") if self._clip is None else self._clip
        torch.nn.utils.clip_grad_norm_([p for p in self._parameters() if id(p) in local], largest)
        norm = torch.nn.utils.clip_grad_norm_([p for p in self._parameters() if id(p) not in local], largest)
        return float(norm) if self._norm else None

    def _agree_on_local(self) -> None:
        """Gradients that stay on a rank (register_local_var) may overflow there alone: then all do on all ranks, as
        another one may have no such gradient."""
        if not self._any_has_local():
            return
        self._optimizer._before_grad_scaler(self._optimizer)
        mine = [p.grad for p, _ in self._optimizer._local.values() if p.grad is not None]
        if not grad_scaler.finite_everywhere(mine, [self._optimizer.process_set], "lightcc.amp.scaler"):
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(float("inf"))  # fill_ takes no sparse one

    def _any_has_local(self) -> bool:
        """Whether any rank has gradients that stay there, which all agree on when that may have changed: only those
        that have the parameter register it."""
        if not self._is_distributed:
            return False
        of = lib.epoch, lib.joins, len(self._optimizer._local)
        if of != self._local_of:
            mine, self._local_of = torch.tensor([len(self._optimizer._local)]), of
            counts = ops.allreduce(mine, op=ops.ReduceOps.Max, name="lightcc.amp.local",
                                   process_set=self._optimizer.process_set)
            self._has_local = bool(counts.item())
        return self._has_local

    def _before_grad_scaler(self, optimizer: Any) -> None:
        """A GradScaler has been given that optimizer."""
        if optimizer is self._optimizer and not self._stepping:
            raise ValueError("MixedPrecision: a GradScaler of the program has been given the optimizer, too. Leave it "
                             "out: precision.backward(loss) and precision.step() scale where a step is in float16. "
                             "MixedPrecision(..., scaler=...) takes one with other settings.")

    def _set_flags(self, level: str) -> None:
        if level not in ("float32", "tf32"):
            return
        if self._flags and not self._flags_before:
            self._flags_before = [getattr(where, name) for where, name, _ in self._flags]
        for where, name, values in self._flags:
            setattr(where, name, values[level])

    def _restore_flags(self) -> None:
        for (where, name, _), value in zip(self._flags, self._flags_before):
            setattr(where, name, value)
        self._flags_before = ()


class _Seen:
    """A hook of the optimizer: notes steps that are not of precision.step()."""

    def __init__(self, precision: MixedPrecision):
        self._precision = weakref.ref(precision)

    def __call__(self, *_: Any) -> None:
        precision = self._precision()
        if precision is not None and not precision._stepping:
            precision._stepped_outside = True


class _OnGpu(Agreement):
    """Numbers travel from the GPU, on a stream of their own: the loss is read where it is, and whoever waits for the
    result waits for forward, but not for backward and what else is queued behind it."""

    def __init__(self, process_set: ProcessSet):
        super().__init__(process_set)
        self._stream = torch.cuda.Stream()

    def _sent(self, name: str, numbers: Sequence[float], loss: Any) -> Tuple[int, Any]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            mine = torch.tensor(numbers, dtype=torch.float64, pin_memory=True).cuda(non_blocking=True)
            if loss is not None:
                mine[1] = loss
                loss.record_stream(self._stream)
            return (0 if stays_here(self._process_set) else self._submit(name, mine)), mine

    def _received(self, handle: int, mine: Any) -> Optional[Sequence[float]]:
        with torch.cuda.stream(self._stream):
            return super()._received(handle, mine)


def _available(device_type: str, context: Any) -> Dict[str, str]:
    """The levels, each with "" or why this device does not have it."""
    if device_type == "cpu":
        has_half = hasattr(torch.amp, "GradScaler") and _autocast_takes("cpu", torch.float16)
        return {"float32": "", "tf32": _ON_GPU, "bfloat16": "", "fp8": _ON_GPU,
                "float16": "" if has_half else f"torch {torch.__version__} does not have it on the CPU"}
    if device_type != "cuda":
        raise ValueError(f"MixedPrecision: device_type={device_type!r} must be 'cuda' or 'cpu'.")
    if not torch.cuda.is_available():
        raise ValueError("MixedPrecision: device_type='cuda', and torch finds no GPU here.")
    is_new = torch.cuda.get_device_capability() >= (8, 0)
    return {"float32": "", "float16": "" if hasattr(torch.amp, "GradScaler") else "it needs torch 2.3",
            "tf32": "" if is_new else "it needs a GPU of compute capability 8.0",
            "bfloat16": "" if torch.cuda.is_bf16_supported() else "this GPU does not compute in it",
            "fp8": "" if context else "it needs context=, a function that returns Transformer Engine's or torchao's "
                                      "context manager"}


def _autocast_is_on(device_type: str) -> bool:
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 or later
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def _autocast_takes(device_type: str, dtype: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that autocast is turned off
        with contextlib.suppress(RuntimeError):
            return torch.autocast(device_type, dtype=dtype)._enabled
    return False


def _flags() -> List[Tuple[Any, str, Dict[str, Any]]]:
    """torch's flags for TF32: object, attribute, and its value for each level."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9 or later, which wants only one kind asked
        values = {"float32": "ieee", "tf32": "tf32"}
        return [(torch.backends.cuda.matmul, "fp32_precision", values),
                (torch.backends.cudnn.conv, "fp32_precision", values),
                (torch.backends.cudnn.rnn, "fp32_precision", values)]
    known = {"float32": False, "tf32": True}
    return [(torch.backends.cuda.matmul, "allow_tf32", known), (torch.backends.cudnn, "allow_tf32", known)]


register_own([(MixedPrecision, StateDictHandler)])
keep_out()
