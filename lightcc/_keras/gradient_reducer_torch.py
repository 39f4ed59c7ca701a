"""The gradients of Keras 3's optimizers on torch. TensorFlow is not imported here.

Keras hands all gradients over at once, after backward, so all of them are on their way before the first is waited for.
"""
from typing import Any, Dict, List

from lightcc._keras.gradient_reducer import GradientReducer
from lightcc.compress.codec import reduction
from lightcc.compress.variable_compression import Gradient, parts_of
from lightcc.core import lib, ops, weights
from lightcc.core.request import new_list, register, submit_list
from lightcc.core.util import split_list
from lightcc.core.wrapper_arguments import stays_here
from lightcc.torch.weights import digests


class TorchGradientReducer(GradientReducer):
    """By asynchronous collectives, which the core puts into buckets."""

    framework = "torch"

    def __init__(self, options, class_name):
        super().__init__(options, class_name)
        self._local: Dict[int, Any] = {}  # by key; kept, so that no other variable gets the key
        self._exchanges = weights.Exchanges()
        self.drop_sums(None)

    def drop_sums(self, backend):
        if self.options.backward_passes_per_step > 1:
            self.helper = _Sums(self.options.backward_passes_per_step, self.options.average_aggregated_gradients)

    def keep_local(self, variable):
        self._local[_key(variable)] = variable

    def apply(self, closure, optimizer, pairs=()):
        if self.helper is None or self.helper.counter == 0:
            return closure()
        optimizer._iterations.assign_add(1)

    def _reduce(self, grads, variables):
        if self.helper is None:
            return self._over_ranks(grads, variables)
        totals = self.helper.add(grads, variables)
        return grads if totals is None else self._over_ranks(totals, variables)

    def _over_ranks(self, grads: List[Any], variables: List[Any]) -> List[Any]:
        process_set, results = self.options.process_set, list(grads)
        if stays_here(process_set):
            return results
        shared = []
        for i, (grad, variable) in enumerate(zip(grads, variables)):
            if grad is not None and _key(variable) not in self._local:
                shared.append(i)
            elif grad is not None and self.options.scale_local_gradients:
                results[i] = grad / process_set.size()
        chosen, pending = self._chosen(shared, grads, variables), []
        for members in self._units(shared, variables):
            rest, of_core = parts_of(members, chosen)
            if rest:
                pending.append((rest, *self._send([grads[i] for i in rest], f"{self.name}.gradient.{members[0]}")))
            if of_core:
                pending.append((of_core, *self._send_through_core([grads[i] for i in of_core],
                                                                  [chosen[i] for i in of_core])))
        for members, handle, contexts in pending:
            for i, output, context in zip(members, ops.synchronize(handle), contexts):
                results[i] = self.wanted.plain.decompress(output, context)
        if exchange := self._exchanges.due():
            self._compare([variable for variable in variables if _key(variable) not in self._local], exchange)
        return results

    def _compare(self, variables: List[Any], exchange: int) -> None:
        held = digests([(str(i), getattr(variable, "_value", variable)) for i, variable in enumerate(variables)])
        weights.compare_in_order(variables, list(held.values()), weights.at(exchange), self.options.process_set)

    def _send(self, grads: List[Any], name: str):
        sent, contexts = zip(*(self.wanted.plain.compress(grad.contiguous()) for grad in grads))
        factor = self.options.gradient_predivide_factor
        handle = ops.grouped_allreduce_async(list(sent), None, name, self.options.op, 1.0 / factor, factor,
                                             self.options.process_set)
        return handle, contexts

    def _chosen(self, shared: List[int], grads: List[Any], variables: List[Any]) -> Dict[int, str]:
        """The gradients that the core compresses, by their places, and what it knows them by."""
        core = self.wanted.core
        return {} if core is None else core.choose({
            i: Gradient(getattr(variables[i], "_value", variables[i]), getattr(variables[i], "path", f"variable_{i}"),
                        grads[i].shape, str(grads[i].dtype).rpartition(".")[2]) for i in shared})

    def _send_through_core(self, grads: List[Any], labels: List[str]):
        core, factor = self.wanted.core, self.options.gradient_predivide_factor
        grads = [grad.contiguous() for grad in grads]
        outputs = new_list(grads)
        name = core.request(self.name, labels, [grad.numel() for grad in grads])
        handle = submit_list(lib.ALLREDUCE, grads, outputs, name, self.options.process_set, 0, **reduction(
            core.codec.id, core.compression, self.options.op, 1.0 / factor, factor))
        return register(handle, grads, outputs), [None] * len(grads)

    def _units(self, shared: List[int], variables: List[Any]) -> List[List[int]]:
        """Which gradients, by their places, travel as one unit."""
        groups = self.options.groups
        if groups is None or not shared:
            return [[i] for i in shared]
        if isinstance(groups, int):
            return split_list(shared, min(groups, len(shared)))
        place = {_key(variables[i]): i for i in shared}
        together = [[place.pop(key) for key in map(_key, group) if key in place] for group in groups]
        return [members for members in together if members] + [[i] for i in place.values()]


class _Sums:
    """Adds up the gradients of several backward passes."""

    def __init__(self, passes: int, average: bool):
        self._passes, self._average = passes, average
        self._sums: Dict[int, Any] = {}
        self.counter = 0  # passes since the gradients last travelled

    def add(self, grads, variables):
        """Returns the sums with the last pass, and starts anew; before that None."""
        self.counter += 1
        for grad, variable in zip(grads, variables):
            if grad is not None:
                total = self._sums.get(_key(variable))
                self._sums[_key(variable)] = grad.clone() if total is None else total.add_(grad)
        if self.counter < self._passes:
            return None
        self.counter = 0
        sums, self._sums = self._sums, {}
        totals = [sums.get(_key(variable)) for variable in variables]
        return [total if total is None or not self._average else total / self._passes for total in totals]


def _key(variable: Any) -> int:
    """What identifies a variable of Keras: the tensor it holds, as in groups either may stand."""
    return id(getattr(variable, "_value", variable))
