"""DelayedGradients: an optimizer whose step applies the averaged gradients of an earlier step, so that their exchange
has a whole step's computation to hide behind. All ranks apply the same gradients in the same step.

Gradients under way are in slots, of which there is one more than the delay; each has a reducer of its own, with its
memory, its requests and what compression leaves behind of it. Backward of step t fills slot t mod n; step t then takes
the gradients of step t - delay out of theirs, which is the slot that backward fills next.
Sources: Ho et al., NeurIPS 2013 (a bounded delay); Zheng et al., ICML 2017 (DC-ASGD: the compensation); Rigazzi, 2019
(DC-S3GD: both with collectives).
"""
import logging
from typing import Any, Dict, List, Optional

import torch

from lightcc.compress.choice import text_of
from lightcc.core import lib, ops
from lightcc.core.agreed_settings import expect_equal, number, whole
from lightcc.core.process_sets import global_process_set
from lightcc.torch.compression import Compression
from lightcc.torch.delayed_slots import DelayedReducer, Slot, compensated, kept, packed, unpacked, values_of
from lightcc.torch.gradient import Gradient, is_part
from lightcc.torch.mpi_ops import Adasum, Average, Max
from lightcc.torch.optimizer import _DistributedOptimizer, wrapped
from lightcc.torch.spans import spanned

KEY = "lightcc_delayed"  # in the state of an optimizer
_WHAT = "hvd.DelayedGradients"
_logger = logging.getLogger("lightcc")


def DelayedGradients(optimizer, delay=1, compensation=0.0, warmup=0, named_parameters=None,
                     compression=Compression.none, backward_passes_per_step=1, op=Average,
                     gradient_predivide_factor=1.0, groups=None, sparse_as_dense=False,
                     process_set=global_process_set):
    """A DistributedOptimizer whose step t applies the averaged gradients of step t - delay (docs/fewer_exchanges.md).

    delay: in steps; 0 is DistributedOptimizer. The first `delay` steps apply nothing: parameters and the optimizer's
    state stay. Memory: a gradient's for each step of delay. warmup: so many steps first apply their own gradients, as
    without delay; then come the `delay` steps that apply nothing. compensation: lambda in g + lambda g g (w - w_then),
    element by element, which is applied in place of g; w_then: the parameter for which g was computed. With
    compensation=0 no copy of it is kept. The other arguments are those of DistributedOptimizer; op: not Adasum.

    step() sends this step's gradients and waits for the earlier ones; learning rates are those of the step that
    applies. synchronize() does both, then p.grad is what step() will apply: clip between it and step() in
    skip_synchronize(). With a GradScaler, a gradient that is not finite has its step skipped `delay` steps later, on
    all ranks. state_dict() waits for the gradients under way and has them, so that a resumed run goes on as if it had
    not ended; broadcast_optimizer_state gives all ranks the root's. After join() and in another epoch of an elastic job
    what was under way is dropped on all ranks, and `delay` steps apply nothing; the warmup counts the most steps that a
    rank has made.

    Errors: ValueError for arguments out of their ranges, LBFGS, op=Adasum; from step() for a closure, and on all ranks
    if they differ in settings; from register_local_var, always; and those of DistributedOptimizer.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> optimizer = hvd.DelayedGradients(torch.optim.SGD([weight], lr=0.5))
    >>> for step in range(3):
    ...     optimizer.zero_grad(); (weight * step).sum().backward(); optimizer.step(); print(weight.item())
    1.0
    1.0
    0.5
    """
    whole(_WHAT, "delay", delay, 0)
    whole(_WHAT, "warmup", warmup, 0)
    number(_WHAT, "compensation", compensation)
    if op == Adasum:
        raise ValueError(f"{_WHAT}: op=Adasum combines steps that ranks have made, which cannot come later. Use "
                         "op=hvd.Average.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{_WHAT}: LBFGS compares losses of one step, whose gradients must not come later. Use "
                         "hvd.DistributedOptimizer.")
    delayed = wrapped(_DelayedOptimizer, optimizer, named_parameters, compression, backward_passes_per_step, op,
                      gradient_predivide_factor, 0, groups, sparse_as_dense, process_set)
    delayed._delay_by(delay, float(compensation), warmup)
    return delayed


class _DelayedOptimizer(_DistributedOptimizer):
    """What the class of what DelayedGradients returns has."""

    _reducer_class = DelayedReducer
    _slots: List[Slot] = []

    def _delay_by(self, delay: int, compensation: float, warmup: int) -> None:
        self._delay, self._compensation, self._warmup = delay, compensation, warmup
        self._exchanged_steps = 0            # those that have come to their exchange
        self._turn = 0                       # the slot that this step fills
        self._era = (0, 0)                   # epoch and joins in which the slots are good
        self._agreed: Any = None             # the era for which settings were compared
        self._applies = False                # p.grad is what step() is to apply
        self._scale_of_step: Optional[float] = None  # by which a GradScaler has multiplied this step's loss
        self._delivered_scale: Optional[float] = None  # of p.grad after an exchange that knew of no GradScaler
        self._used = self._options["compression"]
        self._slots = [Slot(self._reducer, self._gradients)]
        predivide = self.gradient_predivide_factor
        for turn in range(1, delay + 1):
            reducer = self._reducer and self._reducer_class(self._compression, self.op, 1.0 / predivide, predivide,
                                                            self.sparse_as_dense, self._process_set)
            self._slots.append(Slot(reducer, {}))
            self._fill_turn(turn)
            for parameter in self._slots[0].gradients:
                self._track_in(turn, parameter, self._parameter_names[parameter])
            if reducer is not None:
                self._make_groups(self._groups)
        self._fill_turn(0)

    # What users call

    def step(self, closure: Any = None):
        """synchronize(), then the optimizer's own step with the gradients of an earlier one, if there are some."""
        if closure is not None:
            raise ValueError(f"{_WHAT}: step() takes no closure, as it applies the gradients of an earlier step, and "
                             "not those that a closure computes. Call backward() and then step().")
        if self._should_synchronize and (not self._synchronized or self._waiting()):
            self.synchronize()
        elif not self._synchronized:
            raise ValueError(f"{_WHAT}: step() inside skip_synchronize() comes after synchronize(), which brings the "
                             "gradients that it applies.")
        result = self._as_plain.step() if self._applies else None
        self._applies = False
        self._stepped()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # as in _DistributedOptimizer

    @spanned("lightcc.synchronize")
    def synchronize(self) -> None:
        """Sends this step's gradients and waits for those of `delay` steps before, which are in p.grad then."""
        self._drop_what_is_void()
        if self._reducer is not None and self._agreed != self._era:
            under_way = sum(slot.under_way for slot in self._slots)
            expect_equal(_WHAT, self._settings(), self._process_set, {"steps under way": under_way})
            if self._warmup:  # after join() the ranks have made different numbers of steps
                made = torch.tensor([self._exchanged_steps], device="cpu")
                self._exchanged_steps = int(ops.allreduce(made, op=Max, name=f"{_WHAT}.steps",
                                                          process_set=self._process_set))
            self._agreed = self._era
        delay = self._delay if self._exchanged_steps >= self._warmup else 0
        slot, due = self._slots[self._turn], self._slots[(self._turn - delay) % len(self._slots)]
        try:
            with torch.no_grad():
                self._send_into(slot)
                self._deliver(due, delay)
                if self._reducer is not None:
                    self._exchanged()
        finally:
            self._began_epoch = 0
            self._exchanged_steps += 1
            self._fill_turn((self._turn + 1) % len(self._slots))
        self._synchronized = True

    def register_local_var(self, parameter: torch.Tensor) -> None:
        """ValueError: a gradient that stays on its rank need not come later."""
        raise ValueError(f"register_local_var is not supported with {_WHAT}: the gradients of a step are applied "
                         "together, later. Give the parameter to an optimizer of its own.")

    def use_compression(self, compression: Any) -> None:
        """As DistributedOptimizer's; gradients that are under way come as they were sent."""
        _DistributedOptimizer.use_compression(self, compression)
        self._used = compression if self._reducer is None else self._reducer.compression

    def state_dict(self, *args, **kwargs):
        """As DistributedOptimizer's, and "lightcc_delayed": the gradients under way, for which it waits."""
        return {**_DistributedOptimizer.state_dict(self, *args, **kwargs), KEY: self._own_state()}

    def load_state_dict(self, state_dict) -> None:
        """As DistributedOptimizer's, with the gradients that were under way. If they are of another delay they are
        dropped, which is logged."""
        _DistributedOptimizer.load_state_dict(self, state_dict)
        self._load_own_state(state_dict.get(KEY))

    def __reduce_ex__(self, protocol):
        """As DistributedOptimizer's; nothing is under way in a copy."""
        copied, (cls, state, options, ranks, local) = _DistributedOptimizer.__reduce_ex__(self, protocol)
        options = {**options, "delay": self._delay, "compensation": self._compensation, "warmup": self._warmup}
        return copied, (cls, state, options, ranks, local, DelayedGradients)

    # What is under way

    def _send_into(self, slot: Slot) -> None:
        if self._reducer is not None:
            self._send_the_rest()
            self._reducer.leave(self._for_grad_scaler)
        else:
            slot.arrived = [kept(p.grad) for p in self._parameters()]
        slot.under_way = True
        for one in self._slots:
            one.loaded = False
        slot.scale, self._scale_of_step = 1.0 if self._scale_of_step is None else self._scale_of_step, None
        if self._compensation and self._delay:
            if len(slot.weights) != len(self._parameters()):
                slot.weights = [p.detach().clone() for p in self._parameters()]
            else:
                torch._foreach_copy_(slot.weights, [p.detach() for p in self._parameters()])

    def _deliver(self, due: Slot, delay: int) -> None:
        """Makes p.grad what this step applies: the gradients of a slot; zeros, if it is too early for those."""
        parameters = self._parameters()
        self._delivered_scale = None
        self._applies = due.under_way
        if not due.under_way:
            for p in parameters:
                if is_part(p.grad):
                    p.grad.zero_()
                else:  # not what is under way now
                    p.grad = None if p.grad is None else torch.zeros_like(p.grad.detach())
            return
        due.deliver(parameters, self._for_grad_scaler)
        if not delay:
            return
        scale = self._slots[self._turn].scale
        with_grad = [p for p in parameters if p.grad is not None]
        if due.scale == 0.0:  # a GradScaler's may become that small, and nothing is left of such gradients
            self._applies = False
        elif due.scale != scale:
            for p in with_grad:
                p.grad.mul_(scale / due.scale)
            if scale == 1.0 and not all(bool(values_of(p.grad).isfinite().all()) for p in with_grad):
                self._applies = False  # no GradScaler looks at this step
        self._delivered_scale = scale
        if self._compensation and scale:
            for p, then in zip(parameters, due.weights):
                if p.grad is not None:
                    p.grad = compensated(p.grad, p.detach() - then, self._compensation / scale)

    def _note_scaler(self, scaler: Any, optimizer: Any) -> None:
        """A GradScaler is about to unscale the gradients of that optimizer's parameters."""
        if not self._shares_parameters(optimizer):
            return
        if not self._synchronized or self._waiting():
            self._scale_of_step = scaler.get_scale()
            return
        newest = self._slots[(self._turn - 1) % len(self._slots)]
        if newest.scale == 1.0:  # synchronize() was called first, and could not know
            newest.scale = scaler.get_scale()
            if self._delivered_scale == 1.0:
                self._delivered_scale = newest.scale
                for p in self._parameters():
                    if p.grad is not None:
                        p.grad.mul_(newest.scale)

    def _before_grad_scaler(self, optimizer) -> None:
        if self._should_synchronize and (not self._synchronized or self._waiting()) and \
                self._shares_parameters(optimizer):
            self._for_grad_scaler = True
            self.synchronize()

    def _shares_parameters(self, optimizer) -> bool:
        mine = {id(p) for p in self._parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _parameters(self) -> List[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _drop_what_is_void(self) -> None:
        """Other ranks do not have what was under way in another epoch, or when a join ended."""
        era = lib.epoch if lib.initialized() else 0, lib.joins
        if era == self._era:
            return
        self._era = era
        loaded = [slot for slot in self._slots if slot.loaded]
        for slot in self._slots:
            if not slot.loaded:
                slot.drop()
            slot.loaded = False
        if not loaded:
            self._fill_turn(0)  # ranks that had joined have made fewer steps

    def _settings(self) -> Dict[str, Any]:
        return {"delay": self._delay, "compensation": self._compensation, "warmup": self._warmup,
                "compression": text_of(self._compression), "backward_passes_per_step": self._backward_passes_per_step}

    def _own_state(self) -> Dict[str, Any]:
        """The gradients under way, the oldest first, as plain values and tensors."""
        under_way = [{"gradients": [packed(grad) for grad in slot.arrived or ()], "scale": slot.scale,
                      "weights": list(slot.weights)} for slot in self._arrive()]
        return {"delay": self._delay, "steps": self._exchanged_steps, "under_way": under_way}

    def _arrive(self) -> List[Slot]:
        """Waits for the gradients under way; returns their slots, the oldest first."""
        self._drop_what_is_void()
        slots = [self._slots[(self._turn - age) % len(self._slots)] for age in range(self._delay, 0, -1)]
        found = [slot for slot in slots if slot.under_way]
        with torch.no_grad():
            for slot in found:
                slot.arrive(self._parameters())
        return found

    def _load_own_state(self, state: Optional[Dict[str, Any]]) -> None:
        for slot in self._slots:
            slot.drop()
        self._fill_turn(0)
        self._exchanged_steps = state["steps"] if state else 0
        if not state or not state["under_way"]:
            return
        if state["delay"] != self._delay:
            _logger.warning("%s: the gradients under way in this state are of delay=%d, and the optimizer has delay=%d:"
                            " they are dropped.", _WHAT, state["delay"], self._delay)
            return
        parameters = self._parameters()
        for age, saved in enumerate(reversed(state["under_way"]), 1):
            slot = self._slots[(self._turn - age) % len(self._slots)]
            slot.arrived = [unpacked(grad, p) for grad, p in zip(saved["gradients"], parameters)]
            slot.weights = [weight.to(p, copy=True) for weight, p in zip(saved["weights"], parameters)]
            slot.scale, slot.under_way, slot.loaded = saved["scale"], True, True

    # What _DistributedOptimizer asks for

    def _fill_turn(self, turn: int) -> None:
        """From now on gradients are sent by the reducer of that slot."""
        self._turn = turn
        self._reducer, self._gradients = self._slots[turn].reducer, self._slots[turn].gradients
        if self._reducer is not None and len(self._slots) > 1 and self._used is not self._reducer.compression:
            self._reducer.use(self._used)
        self._reset_passes()

    def _track(self, parameter: torch.Tensor, name: str) -> None:
        for turn in range(max(len(self._slots), 1)):
            self._track_in(turn, parameter, name)

    def _track_in(self, turn: int, parameter: torch.Tensor, name: str) -> None:
        """A parameter has a hook for each slot, of which that of the present one sends."""
        before = self._reducer, self._gradients
        if self._slots:
            self._reducer, self._gradients = self._slots[turn].reducer, self._slots[turn].gradients
        _DistributedOptimizer._track(self, parameter, f"{name}.slot{turn}" if turn else name)
        self._reducer, self._gradients = before

    def _accumulated(self, gradient: Gradient) -> None:
        if self._began_epoch != lib.epoch:
            self._drop_what_is_void()
        if self._gradients.get(gradient.parameter) is gradient:
            _DistributedOptimizer._accumulated(self, gradient)

    def _compressing(self) -> List[Any]:
        return [slot.reducer for slot in self._slots if slot.reducer and slot.reducer.compressed]
