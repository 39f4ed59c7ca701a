"""Memory of torch outputs that is used again: a large new tensor costs more in new pages than its exchange.

The pool holds the storages of the outputs it has made, torch's own in every way (they can be resized, shared, pickled),
and uses one again when nobody else refers to it any more: no tensor, view, array, DLPack capsule or storage object.
Outputs of the core, whose shape is known late, come from the core's pool (csrc/engine/request/output_pool.h).
"""
import os
import sys
import threading
import time
from typing import Any, Callable, List, Optional, Tuple

from lightcc.core import lib
from lightcc.core.exiting import at_exit

_LEAST_ELEMENTS = lib.POOLED_BYTES // 8  # with fewer, a tensor is too small whatever its dtype


class _Block:
    """The storage of an output."""

    def __init__(self, storage: Any, used: float) -> None:
        self.storage, self.used = storage, used
        self.address, self.bytes = storage.data_ptr(), storage.nbytes()

    def references(self, count: Callable[[int], int]) -> Tuple[int, int]:
        """How many refer to the storage: in C++, and to the object that stands for it in Python."""
        return count(self.storage._cdata), sys.getrefcount(self.storage)

    def is_whole(self) -> bool:
        """Whether it is as it was made.

        resize_() and share_memory_() replace what a storage stands on; numpy() forbids for ever that it is resized.
        """
        storage = self.storage
        return storage.nbytes() == self.bytes and storage.data_ptr() == self.address and storage.resizable()


class OutputPool:
    """New outputs for one process; every method may be called from any thread.

    What it holds, in use or not, is at most the core's LIGHTCC_OUTPUT_POOL_BYTES, so no more than that can wait for
    the next output. A block is forgotten LIGHTCC_OUTPUT_POOL_IDLE_SECONDS after it was last handed out, and all are
    when the epoch ends: torch frees those that nobody uses, and later, as ever, those that somebody does.
    """

    def __init__(self, torch: Any, clock: Callable[[], float] = time.monotonic, watches: bool = True) -> None:
        """watches: a thread forgets what is idle; else whoever calls forget_idle()."""
        self._torch, self._clock, self._watches = torch, clock, watches
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._new = torch.empty_like
        # Since PyTorch 2.1.
        self._count: Optional[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", None)
        self._unused: Optional[Tuple[int, int]] = None  # the references of a block that only the pool holds
        self._limits: Tuple[int, int, float] = (0, 0, 0.0)  # of which epoch; bytes, seconds
        self._blocks: List[_Block] = []  # by the time they were last used
        self._over = False  # the interpreter ends
        self._reset()
        lib.after_epoch.append(self.forget_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:  # also in a forked child, which has not the thread, but maybe its lock
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._watcher: Optional[threading.Thread] = None
        self._blocks = []

    def empty_like(self, tensor: Any) -> Any:
        """torch.empty_like, in memory that was an earlier output's if there is some."""
        if tensor.numel() < _LEAST_ELEMENTS or type(tensor) not in self._plain:
            return self._new(tensor)
        if not tensor.is_cpu or tensor.layout is not self._torch.strided or tensor.nbytes < lib.POOLED_BYTES:
            return self._new(tensor)
        if not self._lock.acquire(blocking=False):  # busy with another thread's, or below in this stack
            return self._new(tensor)
        try:
            return self._take(tensor)
        finally:
            self._lock.release()

    def _take(self, tensor: Any) -> Any:
        most_bytes, _ = self._limits_now()
        count = self._counting() if tensor.nbytes <= most_bytes else None
        if count is None:
            return self._new(tensor)
        now, blocks = self._clock(), self._blocks  # if the epoch ends meanwhile, the pool has got another list
        block = self._find(blocks, tensor.nbytes, count)
        if block is None:
            output = self._new(tensor)
            block = _Block(output.untyped_storage(), now)
        else:
            output = tensor.new_empty(0).set_(block.storage, 0, tensor.shape, tensor.stride())
            block.used = now
        blocks.append(block)
        held = sum([block.bytes for block in blocks])
        while held > most_bytes:
            held -= blocks.pop(0).bytes
        self._watch()
        return output

    def _limits_now(self) -> Tuple[int, float]:
        if self._limits[0] != lib.epoch:
            self._limits = (lib.epoch, *(lib.output_pool() if lib.initialized() else (0, 0.0)))
        return self._limits[1:]

    def _find(self, blocks: List[_Block], size: int, count: Callable[[int], int]) -> Optional[_Block]:
        """Takes an unused block of so many bytes out of the list, the one that was used last."""
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            if block.bytes == size and block.references(count) == self._unused:
                del blocks[i]
                if block.is_whole():
                    return block
        return None

    def _counting(self) -> Optional[Callable[[int], int]]:
        """What counts references in C++, if this PyTorch and Python count so that every kind is seen; else nothing is
        kept."""
        if self._unused is None:
            self._unused = self._references_of_unused(self._count) if self._count else (0, 0)
        return None if self._unused == (0, 0) else self._count

    def _references_of_unused(self, count: Callable[[int], int]) -> Tuple[int, int]:
        block = _Block(self._torch.empty(64, dtype=self._torch.uint8, device="cpu").untyped_storage(), 0.0)
        unused = block.references(count)

        def tensor() -> Any:
            return self._torch.empty(0, dtype=self._torch.uint8, device="cpu").set_(block.storage)
        kinds: List[Callable[[], Any]] = [tensor, lambda: tensor()[1:], lambda: tensor().detach().numpy(),
                                          lambda: tensor().untyped_storage(), lambda: memoryview(tensor().numpy()),
                                          lambda: self._torch.utils.dlpack.to_dlpack(tensor())]
        for make in kinds:
            reference = make()
            if block.references(count) == unused:
                return 0, 0
            del reference
            if block.references(count) != unused:
                return 0, 0
        return unused

    def held_bytes(self) -> int:
        """The bytes of all blocks, in use or not."""
        return sum(block.bytes for block in self._blocks)

    # Giving back

    def forget_all(self) -> None:
        """The epoch has ended: what operations may have left unfinished is not used again."""
        self._blocks = []
        self._wake.set()

    def forget_idle(self) -> float:
        """Forgets what is idle; seconds until the next of the others is, 0 if there is none."""
        _, idle_s = self._limits[1:]
        now = self._clock()
        with self._lock:
            blocks = self._blocks
            while blocks and now - blocks[0].used >= idle_s:
                del blocks[0]
            return blocks[0].used + idle_s - now if blocks else 0.0

    def _watch(self) -> None:
        if self._watches and self._watcher is None and not self._over:
            at_exit(self._stop)
            self._watcher = threading.Thread(target=self._run, name="lightcc-outputs", daemon=True)
            self._watcher.start()

    def _run(self) -> None:
        while True:
            wait_s = self.forget_idle()
            with self._lock:
                if not self._blocks:
                    self._watcher = None
                    return
            self._wake.wait(min(wait_s, threading.TIMEOUT_MAX))
            self._wake.clear()

    def _stop(self) -> None:  # no thread of ours outlives the main thread
        self._over = True
        watcher = self._watcher
        self.forget_all()
        if watcher is not None:
            watcher.join()
