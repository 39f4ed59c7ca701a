"""The core's handles of gradients on their way, where a program asks for them: poll and synchronize take them."""
import functools
from array import array
from typing import Any, Dict, Optional, Sequence

from lightcc.core import request
from lightcc.core.exceptions import HorovodInternalError
from lightcc.torch import changed_gradients
from lightcc.torch.gradient import Gradient


class SeenHandles:
    """Handles that the program has seen. The core wants each to be waited for once: that is done by the program with
    synchronize, or else with all others."""

    def __init__(self):
        self._succeeded: Dict[int, bool] = {}  # by handle: whether the program has waited for it, without an error

    def handle_of(self, gradient: Gradient) -> int:
        """The handle of a gradient that is sent, which synchronize may now wait for; 0 while its group waits."""
        group = gradient.group
        handle = gradient.handle if group is None else group.handle
        if handle and handle not in self._succeeded:
            members = [gradient] if group is None else group.members
            result = gradient.slot if group is None else [member.slot for member in members]
            self._succeeded[handle] = False
            request.register(handle, None, None, functools.partial(self._success, result, tuple(members)))
        return handle

    def _success(self, result: Any, members: Sequence[Gradient], handle: int) -> Any:
        self._succeeded[handle] = True
        if members[0].stream is not None:
            members[0].stream.lead()
        changed_gradients.expect_unchanged(members)
        return result

    def take_back(self, handles: "array[int]") -> Optional[Exception]:
        """Takes out of `handles` those for which the program has waited; returns an error if one of them failed."""
        failure = None
        for handle, succeeded in self._succeeded.items():
            if not request.unregister(handle):
                handles.remove(handle)
                if not succeeded:
                    failure = HorovodInternalError("The allreduce of a gradient failed, which synchronize(handle) has "
                                                   "raised already; the gradients of this step are not reduced.")
        self._succeeded.clear()
        return failure
