"""The kernels of codecs on a GPU, beside a copy of device memory, torch.topk and the CPU's selection.
bench/gpu_compression.py starts it.

    python bench/gpu_codecs.py LIBRARY.so CORE.so OUTPUT.json [PART ...]

LIBRARY.so: of gpu_codecs.cc. CORE.so: lightcc's. PART: names of PARTS.
"""
import ctypes
import json
import os
import statistics
import sys
import time
import traceback
from ctypes import c_char_p, c_double, c_float, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

N = 100_000_000          # elements of the large piece
ROUNDS, WARM_UP = 15, 6
HELD_CYCLES = 3_000_000  # of the GPU, in which a call is queued: it shall not wait for the host
TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 10}
DEVICE = "cuda"

Rows = List[Dict[str, Any]]


class Library:
    """gpu_codecs.cc."""

    def __init__(self, path: str):
        self.functions = ctypes.CDLL(path)
        for name, result, arguments in (
                ("open", c_char_p, [c_char_p]), ("topk_bytes", c_size_t, [c_size_t, c_size_t, c_int]),
                ("int8_bytes", c_size_t, [c_size_t]), ("state_bytes", c_size_t, []),
                ("new", c_void_p, [c_int, c_int, c_size_t]), ("delete", None, [c_void_p]),
                ("set_encode", c_char_p, [c_void_p, c_size_t, *[c_void_p] * 5, c_size_t, c_size_t, c_float, c_int,
                                          c_int]),
                ("set_decode", c_char_p, [c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_int,
                                          c_int, c_int, c_void_p]),
                ("run", c_char_p, [c_void_p, c_void_p]),
                ("cpu_topk", c_double, [c_void_p, c_void_p, c_size_t, c_size_t, c_int])):
            function = getattr(self.functions, f"codecs_{name}")
            function.restype, function.argtypes = result, arguments

    def check(self, failure: Optional[bytes]) -> None:
        if failure:
            raise RuntimeError(failure.decode())


library: Library


class Runner:
    """A batch of pieces."""

    def __init__(self, is_topk: bool, decodes: bool, pieces: int):
        self.handle = library.functions.codecs_new(is_topk, decodes, pieces)

    def run(self) -> None:
        library.check(library.functions.codecs_run(self.handle, torch.cuda.current_stream().cuda_stream))

    def profile(self) -> Dict[str, float]:
        """Microseconds of each kernel, if PyTorch's profiler knows them."""
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                self.run()
                torch.cuda.synchronize()
            return {event.key.replace("lightcc_", ""): round(event.device_time, 1) for event in profiler.key_averages()
                    if event.key.startswith("lightcc_")}
        except Exception as error:  # whatever it lacks, times of calls are measured without it
            return {f"unknown: {error}"[:100]: 0.0}

    def close(self) -> None:
        torch.cuda.synchronize()
        library.functions.codecs_delete(self.handle)


class Encoder(Runner):
    """Pieces of these sizes, which select so many each (None: int8)."""

    def __init__(self, counts: List[int], ratio: Optional[float], dtype: torch.dtype = torch.float32,
                 half: bool = False, gradients: Optional[List[torch.Tensor]] = None):
        super().__init__(ratio is not None, False, len(counts))
        self.counts, self.dtype, self.half, self.scale = counts, dtype, half, 1.0
        self.ks = [0 if ratio is None else max(1, round(ratio * count)) for count in counts]
        self.gradients = gradients or [normal(count, dtype) for count in counts]
        self.residuals = [[torch.zeros(count, device=DEVICE) for _ in range(2)] for count in counts]
        self.states = torch.zeros(len(counts), library.functions.codecs_state_bytes(), dtype=torch.uint8, device=DEVICE)
        self.bytes_of = [library.functions.codecs_int8_bytes(count) if ratio is None else
                         library.functions.codecs_topk_bytes(count, k, int(half)) for count, k in zip(counts, self.ks)]
        self.bodies = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in self.bytes_of]
        self.set_gradients()

    def set_gradients(self) -> None:
        for i, gradient in enumerate(self.gradients):
            library.check(library.functions.codecs_set_encode(
                self.handle, i, gradient.data_ptr(), *(one.data_ptr() for one in self.residuals[i]),
                self.states[i].data_ptr(), self.bodies[i].data_ptr(), self.counts[i], self.ks[i], self.scale,
                TYPES[self.dtype], int(self.half)))

    def draw(self, _: str = "") -> None:
        for gradient in self.gradients:
            gradient.normal_()

    def draw_and_forget(self, _: str = "") -> None:
        """The next guess comes from a sample."""
        self.draw()
        self.states[:, 4:].zero_()  # not which buffer holds the residual

    def holds(self, i: int = 0) -> int:
        return int(self.states[i].view(torch.int32)[0])

    def residual(self, i: int = 0) -> torch.Tensor:
        return self.residuals[i][self.holds(i)]


class Decoder(Runner):
    def __init__(self, bodies: torch.Tensor, nodes: int, out: torch.Tensor, k: int):
        """bodies: of all nodes, one behind the other. k: 0 for int8."""
        super().__init__(k > 0, True, 1)
        self.bodies, self.out, self.error = bodies, out, torch.zeros(1, dtype=torch.int64, device=DEVICE)
        library.check(library.functions.codecs_set_decode(
            self.handle, 0, bodies.data_ptr(), bodies.numel() // nodes, out.data_ptr(), out.numel(), k, nodes,
            TYPES[out.dtype], 0, self.error.data_ptr()))


def normal(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, device=DEVICE).to(dtype)


def measure(calls: Dict[str, Callable[[], Any]], before: Optional[Callable[[str], Any]] = None,
            rounds: int = ROUNDS) -> Dict[str, float]:
    """Microseconds of a call, medians, taken by turns. before(name): what is not measured."""
    samples: Dict[str, List[float]] = {name: [] for name in calls}
    for turn in range(rounds + WARM_UP):
        for name, call in calls.items():
            if before:
                before(name)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(HELD_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= WARM_UP:
                samples[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(all_) for name, all_ in samples.items()}


_copied: Dict[str, float] = {}


def copy_rate() -> float:
    """Bytes a microsecond that a copy of device memory reads and writes, buffers beyond the cache."""
    if not _copied:
        from_, to = torch.zeros(N, device=DEVICE), torch.zeros(N, device=DEVICE)
        _copied["rate"] = 2 * 4 * N / measure({"copy": lambda: to.copy_(from_)})["copy"]
    return _copied["rate"]


def row(case: str, value: float, unit: str, goal: Optional[float] = None, at_least: bool = True,
        **more: Any) -> Dict[str, Any]:
    met = None if goal is None else (value >= goal if at_least else value <= goal)
    made = {"case": case, "value": round(value, 4), "unit": unit, "goal": goal, "met": met, **more}
    verdict = "" if goal is None else f"  {'>=' if at_least else '<='} {goal}  {'ok' if met else 'MISSED'}"
    details = ", ".join(f"{name} {x:.1f}" if isinstance(x, float) else f"{name} {x}" for name, x in more.items()
                        if name != "kernels")
    print(f"{case:<58}{value:>9.3f} {unit}{verdict}  ({details})", flush=True)
    if "kernels" in more:
        print("  kernels, µs: " + ", ".join(f"{name} {us:.1f}" for name, us in more["kernels"].items()), flush=True)
    return made


def bandwidth_row(case: str, bytes_: float, us: float, goal: Optional[float], **more: Any) -> Dict[str, Any]:
    return row(case, bytes_ / us / copy_rate(), "of copy", goal, us=us, gb_per_s=bytes_ / us / 1e3, **more)


# ---- parts

def check_sums(encoder: Encoder, expected: torch.Tensor, case: str) -> None:
    """What is sent and what is left behind are the sums, and no sent one is smaller than one that is left."""
    sent = torch.zeros_like(expected)
    decoder = Decoder(encoder.bodies[0], 1, sent, encoder.ks[0])
    decoder.run()
    torch.cuda.synchronize()
    assert int(decoder.error) == 0, f"{case}: the message was refused"
    residual = encoder.residual()
    assert int(torch.count_nonzero(sent)) == encoder.ks[0], f"{case}: {int(torch.count_nonzero(sent))} are sent"
    assert torch.equal(sent + residual, expected), f"{case}: what is sent and what is left are not the sum"
    least = torch.where(sent != 0, sent.abs(), torch.inf).min()
    assert float(least) >= float(residual.abs().max()), f"{case}: others are larger"
    decoder.close()


def encode_rows() -> Rows:
    rows = []
    for ratio in (0.01, 0.001):
        encoder = Encoder([N], ratio)
        encoder.run()
        check_sums(encoder, encoder.gradients[0], f"{ratio} of {N}")
        warm = measure({"warm": encoder.run}, encoder.draw)["warm"]
        message = encoder.bytes_of[0]
        rows.append(bandwidth_row(f"encode {ratio:.1%}, warm, by 12 bytes", 12 * N, warm, 0.8, message=message,
                                  kernels=encoder.profile()))
        cold = measure({"cold": encoder.run}, encoder.draw_and_forget)["cold"]
        encoder.draw_and_forget()
        kernels = encoder.profile()
        rows.append(row(f"encode {ratio:.1%}, cold beside warm", cold / warm, "times", 1.2, False, us=cold,
                        host_us=host_us(encoder), kernels=kernels))
        encoder.close()
        del encoder
    for dtype in (torch.bfloat16, torch.float16):
        encoder = Encoder([N], 0.01, dtype, half=True)
        warm = measure({"warm": encoder.run}, encoder.draw)["warm"]
        rows.append(bandwidth_row(f"encode 1.0%, {str(dtype)[6:]} as float16, by 10 bytes", 10 * N, warm, None,
                                  kernels=encoder.profile()))
        encoder.close()
        del encoder
    return rows


def decode_rows() -> Rows:
    rows = []
    for ratio in (0.01, 0.001):
        encoder = Encoder([N], ratio)
        bodies, sums = [], torch.zeros(N, device=DEVICE)
        for _ in range(8):
            encoder.gradients[0].normal_()
            encoder.run()
            bodies.append(encoder.bodies[0].clone())
        for nodes in (2, 8):
            decoder = Decoder(torch.cat(bodies[:nodes]), nodes, sums, encoder.ks[0])
            us = measure({"decode": decoder.run})["decode"]
            assert int(decoder.error) == 0, "a message was refused"
            rows.append(bandwidth_row(f"decode {nodes} messages of {ratio:.1%}, by 4 bytes and messages",
                                      4 * N + nodes * encoder.bytes_of[0], us, 0.8, kernels=decoder.profile()))
            decoder.close()
        encoder.close()
        del encoder
    return rows


def int8_rows() -> Rows:
    encoder = Encoder([N], None)
    encoder.run()
    sums = torch.zeros(N, device=DEVICE)
    decoder = Decoder(encoder.bodies[0], 1, sums, 0)
    decoder.run()
    torch.cuda.synchronize()
    assert torch.equal(sums + encoder.residual(), encoder.gradients[0]), "int8: what is sent and left are not the sum"
    us = measure({"int8": encoder.run})["int8"]
    bytes_ = encoder.bytes_of[0] + 12 * N
    rows = [bandwidth_row("int8 encode, by 13 bytes", bytes_, us, 0.85, kernels=encoder.profile())]
    for nodes in (2, 8):
        many = Decoder(encoder.bodies[0].repeat(nodes), nodes, sums, 0)
        us = measure({"int8": many.run})["int8"]
        rows.append(bandwidth_row(f"int8 decode of {nodes} messages, by 4 bytes and messages",
                                  4 * N + nodes * encoder.bytes_of[0], us, None, kernels=many.profile()))
        many.close()
    decoder.close()
    encoder.close()
    return rows


def drift_rows() -> Rows:
    rows = []
    for ratio in (0.01, 0.001):
        steady = Encoder([N], ratio)
        warm = measure({"warm": steady.run}, steady.draw, 7)["warm"]
        for factor, name in ((1.2, "grow"), (1 / 1.2, "shrink")):
            for residual in steady.residuals[0]:
                residual.zero_()
            steady.states.zero_()
            steady.scale = 1.0
            took = []
            for _ in range(52):
                steady.scale *= factor
                steady.set_gradients()
                steady.draw()
                took.append(once(steady))
            mean = statistics.mean(took[2:])
            rows.append(row(f"gradients {name} by 20 % a step, {ratio:.1%}, 50 steps", mean / warm, "times of warm",
                            1.3, False, us=mean, slowest=max(took[2:]), over_1_3=sum(x > 1.3 * warm for x in took[2:])))
        steady.close()
        del steady
    return rows


def once(runner: Runner) -> float:
    """Microseconds of one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HELD_CYCLES)
    begin.record()
    runner.run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def host_us(runner: Runner) -> float:
    """Microseconds until a call has returned."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    runner.run()
    return 1e6 * (time.perf_counter() - begin)


def bert_base() -> List[int]:
    """Elements of each parameter of BERT-base: embeddings, 12 layers, pooler."""
    hidden, inner = 768, 3072
    norm = [hidden, hidden]
    layer = [*[hidden * hidden, hidden] * 4, *norm, hidden * inner, inner, inner * hidden, hidden, *norm]
    return [30522 * hidden, 512 * hidden, 2 * hidden, hidden, hidden, *layer * 12, hidden * hidden, hidden]


def batch_rows() -> Rows:
    rows = []
    for name, counts in (("matrices", [count for count in bert_base() if count > 4096]), ("all tensors", bert_base())):
        times = {}
        for how, pieces in (("batch", counts), ("one", [sum(counts)])):
            encoder = Encoder(pieces, 0.01)
            times[how] = measure({how: encoder.run}, encoder.draw)[how]
            kernels = encoder.profile()
            print(f"  {how} of {len(pieces)}: {times[how]:.1f} µs, host {host_us(encoder):.1f} µs, kernels {kernels}",
                  flush=True)
            encoder.close()
            del encoder
        rows.append(row(f"BERT-base's {len(counts)} {name} as a batch beside one piece", times["batch"] / times["one"],
                        "times", 1.3, False, us=times["batch"], one_us=times["one"]))
    return rows


def torch_rows() -> Rows:
    rows = []
    for ratio in (0.01, 0.001):
        encoder = Encoder([N], ratio)
        k, gradient = encoder.ks[0], encoder.gradients[0]
        residual = torch.zeros(N, device=DEVICE)

        def by_torch(k: int = k, gradient: torch.Tensor = gradient, residual: torch.Tensor = residual) -> Tuple:
            residual.add_(gradient)
            indices = residual.abs().topk(k, sorted=False).indices
            values = residual[indices]
            residual[indices] = 0
            return indices, values

        took = measure({"lightcc": encoder.run, "torch": by_torch}, encoder.draw, 7)
        rows.append(row(f"encode {ratio:.1%} beside torch.topk", took["torch"] / took["lightcc"], "times faster", 4.0,
                        us=took["lightcc"], torch_us=took["torch"]))
        encoder.close()
        del encoder
    threads = min(16, len(os.sched_getaffinity(0)))
    on_host = torch.randn(2, N)
    seconds = library.functions.codecs_cpu_topk(on_host[0].data_ptr(), on_host[1].data_ptr(), N, N // 100, threads)
    rows.append(row(f"selection of 1.0% by {threads} cores of the host", 1e3 * seconds, "ms"))
    return rows


def large_rows() -> Rows:
    """2^31 + 3 elements, and at an address that is a multiple of 4 only."""
    count = 2 ** 31 + 3
    gradient = torch.empty(count + 1, device=DEVICE)[1:]
    gradient.normal_()
    encoder = Encoder([count], 0.001, gradients=[gradient])
    us = once(encoder)
    check_sums(encoder, gradient, "2^31 + 3 elements")
    made = [row("2^31 + 3 elements, cold: sums, order and count are right", us / 1e3, "ms", kernels=encoder.profile())]
    encoder.close()
    return made


PARTS: Dict[str, Callable[[], Rows]] = {"encode": encode_rows, "decode": decode_rows, "int8": int8_rows,
                                        "torch": torch_rows, "batch": batch_rows, "drift": drift_rows,
                                        "large": large_rows}


def main() -> int:
    global library
    path, core, output, *names = sys.argv[1:]
    library = Library(path)
    library.check(library.functions.codecs_open(core.encode()))
    torch.manual_seed(1)
    print(f"a copy of device memory: {copy_rate() / 1e3:.0f} GB/s", flush=True)
    all_rows, failed = [{"case": "copy", "value": copy_rate() / 1e3, "unit": "GB/s"}], 0
    for name in names or PARTS:
        try:
            all_rows += PARTS[name]()
        except Exception:  # the next part runs whatever becomes of this one
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
            failed += 1
        torch.cuda.empty_cache()
        Path(output).write_text(json.dumps(all_rows, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
