// The table of the core (device/cuda.h) on a real GPU, beside CUDA's runtime, which is here what it is in a framework.
// Of lightcc it links only reduce(), which scaling must equal; cuda_functions.sh starts it.
//
//   cuda_functions CORE
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device/cuda.h"
#include "device/device.h"
#include "unit/copy_cases.h"
#include "unit/scale_cases.h"

namespace {

constexpr size_t kBytes = size_t(64) << 20;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::exit(1);
}

void check(const char* failure) {
  if (!failure) return;
  std::fprintf(stderr, "%s\n", failure);
  std::exit(1);
}

void check(cudaError_t status) {
  if (status != cudaSuccess) check(cudaGetErrorString(status));
}

void expect_words(const char* failure, const char* attempted, const char* name) {
  expect(failure, name);
  std::printf("%s\n", failure);
  expect(std::strstr(failure, attempted) == failure, attempted);
  expect(std::strstr(failure, name), name);
  expect(cudaGetLastError() == cudaSuccess, "no error is left behind");
}

template <class Function>
Function symbol(const char* library, const char* name) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!opened) check(dlerror());
  void* found = dlsym(opened, name);
  expect(found, name);
  return reinterpret_cast<Function>(found);
}

bool has_context() {
  static const auto get = symbol<CUresult (*)(CUcontext*)>("libcuda.so.1", "cuCtxGetCurrent");
  CUcontext context = nullptr;
  return get(&context) == CUDA_SUCCESS && context;
}

// Of the thread's context, or -1. cudaGetDevice would answer without one too.
int device_of_context() {
  static const auto get = symbol<CUresult (*)(CUdevice*)>("libcuda.so.1", "cuCtxGetDevice");
  CUdevice device = -1;
  return get(&device) == CUDA_SUCCESS ? device : -1;
}

constexpr int kGateTicks = 200'000;  // of 100 us: then a gate opens by itself, so that who waits for it can be named

struct Gate {
  std::atomic<bool> open{false}, forced{false};
  std::atomic<int> rung{0};
};
void wait_at(void* argument) {
  auto* gate = static_cast<Gate*>(argument);
  for (int tick = 0; !gate->open && tick < kGateTicks; ++tick) usleep(100);
  if (!gate->open) gate->forced = true;
}
void ring(void* gate) { ++static_cast<Gate*>(gate)->rung; }

bool reached(const lightcc::CudaFunctions& cuda, int device, void* event) {
  int is = -1;
  check(cuda.query(device, event, &is));
  return is == 1;
}

// To the device on one stream and back on another, which an event orders.
void copies_both_ways(const lightcc::CudaFunctions& cuda, int device) {
  void *there = nullptr, *back = nullptr, *sent = nullptr, *received = nullptr;
  check(cuda.create_stream(device, &there));
  check(cuda.create_stream(device, &back));
  check(cuda.create_event(device, &sent));
  check(cuda.create_event(device, &received));
  expect(!has_context(), "a thread without a context gets none");

  std::vector<uint32_t> from(kBytes / sizeof(uint32_t)), to(from.size());
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i * 2654435761u);
  check(cuda.pin(device, from.data(), kBytes));
  check(cuda.pin(device, to.data(), kBytes));
  expect(!has_context(), "pinning leaves no context");
  check(cudaSetDevice(device));
  void* memory = nullptr;
  check(cudaMalloc(&memory, kBytes));

  Gate gate;
  check(cuda.call(device, there, wait_at, &gate));
  check(cuda.copy(device, there, memory, from.data(), kBytes));
  check(cuda.record(device, sent, there));
  check(cuda.order(device, back, sent));
  check(cuda.copy(device, back, to.data(), memory, kBytes));
  check(cuda.record(device, received, back));
  check(cuda.call(device, back, ring, &gate));
  check(cudaStreamSynchronize(nullptr));  // the default stream does not wait for these
  expect(!reached(cuda, device, sent) && !reached(cuda, device, received), "nothing passes the gate");
  expect(gate.rung == 0 && to[1] == 0, "the second stream waits for the first");
  expect(cudaGetLastError() == cudaSuccess, "what is not ready is no error");
  gate.open = true;
  while (gate.rung == 0) usleep(100);
  expect(reached(cuda, device, sent) && reached(cuda, device, received), "both events are reached when the call comes");
  expect(to == from, "what comes back is what was sent");

  expect_words(cuda.pin(device, from.data(), kBytes), "cuMemHostRegister: ",
               "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
  check(cuda.unpin(device, from.data()));
  check(cuda.unpin(device, to.data()));
  expect_words(cuda.unpin(device, to.data()), "cuMemHostUnregister: ",
               "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED");
  check(cuda.destroy_event(device, sent));
  check(cuda.destroy_event(device, received));
  check(cuda.destroy_stream(device, there));
  check(cuda.destroy_stream(device, back));
  check(cudaFree(memory));
}

void find_device(void* found) { *static_cast<int*>(found) = device_of_context(); }

// What the table does on one device leaves the caller on another.
void keeps_the_device(const lightcc::CudaFunctions& cuda, int devices) {
  for (int mine = 0; mine < devices; ++mine) {
    check(cudaSetDevice(mine));
    for (int other = 0; other < devices; ++other) {
      void *event = nullptr, *stream = nullptr;
      check(cuda.create_stream(other, &stream));
      check(cuda.create_event(other, &event));
      check(cuda.record(other, event, stream));
      while (!reached(cuda, other, event)) usleep(100);
      int found = -1;
      check(cuda.on_device(other, find_device, &found));
      expect(found == other, "the function runs with the device as the current one");
      check(cuda.destroy_event(other, event));
      check(cuda.destroy_stream(other, stream));
      int current = -1;
      check(cudaGetDevice(&current));
      expect(current == mine && has_context(), "the caller's device is unchanged");
    }
    void* stream = nullptr;
    expect_words(cuda.create_stream(devices, &stream), "cuDeviceGet: ", "CUDA_ERROR_INVALID_DEVICE");
    int current = -1, found = -2;
    expect_words(cuda.on_device(devices, find_device, &found), "cuDeviceGet: ", "CUDA_ERROR_INVALID_DEVICE");
    expect(found == -2, "on a device that is not there nothing is called");
    check(cudaGetDevice(&current));
    expect(current == mine, "nor does a failure change it");
  }
}

// A graph that is being captured survives what this thread does meanwhile.
void captures_go_on(const lightcc::CudaFunctions& cuda, int device) {
  check(cudaSetDevice(device));
  cudaStream_t captured = nullptr;
  cudaGraph_t graph = nullptr;
  void *event = nullptr, *stream = nullptr;
  check(cuda.create_stream(device, &stream));
  check(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
  check(cuda.create_event(device, &event));
  check(cuda.record(device, event, stream));
  while (!reached(cuda, device, event)) usleep(100);
  check(cudaStreamEndCapture(captured, &graph));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(captured));
  check(cuda.destroy_event(device, event));
  check(cuda.destroy_stream(device, stream));
}

// A stream that stands at a gate, if it is to, and another one that does not.
struct Streams {
  const lightcc::CudaFunctions& cuda;
  int device;
  Gate gate;
  void *gated = nullptr, *free = nullptr, *event = nullptr;

  Streams(const lightcc::CudaFunctions& table, int on, bool stands = false) : cuda(table), device(on) {
    gate.open = !stands;
    check(cuda.create_stream(device, &gated));
    check(cuda.create_stream(device, &free));
    check(cuda.create_event(device, &event));
    check(cuda.call(device, gated, wait_at, &gate));
  }
  ~Streams() {
    expect_nobody_waited();
    gate.open = true;
    finish(gated);
    check(cuda.destroy_event(device, event));
    check(cuda.destroy_stream(device, gated));
    check(cuda.destroy_stream(device, free));
  }
  void expect_nobody_waited() const { expect(!gate.forced, "no call waits for another stream"); }
  void* allocate(void* stream, size_t bytes) {
    void* memory = nullptr;
    check(cuda.allocate(device, stream, bytes, &memory));
    expect(bytes == 0 || memory, "memory");
    return memory;
  }
  void finish(void* stream) {
    check(cuda.record(device, event, stream));
    while (!reached(cuda, device, event)) usleep(100);
  }
};

// The first kernel and the first memory do not wait for what another stream has to do, nor does what follows: main()
// calls this before anything else has been allocated or launched.
void waits_for_nothing(const lightcc::CudaFunctions& cuda, int device) {
  Streams on(cuda, device, !std::getenv("UNDER"));  // compute-sanitizer runs one thing after the other
  void* memory = on.allocate(on.free, kBytes);
  on.expect_nobody_waited();
  for (int dtype = 0; dtype < lightcc::kDTypes; ++dtype)
    check(cuda.scale(device, on.free, dtype, memory, memory, 1000, 0.5));
  auto* const bytes = static_cast<std::byte*>(memory);
  const lightcc::CudaCopy copies[] = {{bytes, bytes + 1000, 1000}, {bytes + 2000, bytes + 3000, 1000}};
  check(cuda.copy_all(device, on.free, copies, 2));
  on.expect_nobody_waited();
  check(cuda.release(device, on.free, memory));
  void* other = on.allocate(on.gated, kBytes);  // what is free of the same pool, or new
  check(cuda.release(device, on.gated, other));
  on.finish(on.free);
  check(cuda.record(device, on.event, on.gated));
  expect(on.gate.open || !reached(cuda, device, on.event), "the other stream still waits");
  expect(!has_context(), "a thread without a context gets none");
  expect(!on.allocate(on.free, 0), "no memory for no bytes");
  check(cuda.release(device, on.free, nullptr));
}

// Where memory is short CUDA waits for all streams, since they may give some back: nothing stands at a gate here.
void fails_in_words(const lightcc::CudaFunctions& cuda, int device) {
  void *stream = nullptr, *none = &none;
  check(cuda.create_stream(device, &stream));
  expect_words(cuda.allocate(device, stream, size_t(1) << 50, &none), "cuMemAllocFromPoolAsync: ",
               "CUDA_ERROR_OUT_OF_MEMORY");
  expect(!none, "no memory where it fails");
  expect_words(cuda.scale(device, stream, lightcc::kDTypes, nullptr, nullptr, 1, 2),
               "launch of the kernel that scales: ", "CUDA_ERROR_INVALID_VALUE");
  check(cuda.destroy_stream(device, stream));
}

// Many times more memory than a GPU has, each piece used and given back before the last one has been read.
void memory_follows_its_stream(const lightcc::CudaFunctions& cuda, int device) {
  constexpr size_t rounds = 4096;
  std::vector<uint32_t> from(kBytes / sizeof(uint32_t)), to(rounds);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i * 2654435761u);
  check(cuda.pin(device, from.data(), kBytes));
  check(cuda.pin(device, to.data(), rounds * sizeof(uint32_t)));
  Streams on(cuda, device);
  for (size_t i = 0; i < rounds; ++i) {
    void *first = on.allocate(on.free, kBytes), *second = on.allocate(on.free, kBytes);
    check(cuda.copy(device, on.free, first, &from[i], 4096));
    check(cuda.copy(device, on.free, second, first, 4096));
    check(cuda.release(device, on.free, first));
    check(cuda.copy(device, on.free, &to[i], second, sizeof(uint32_t)));
    check(cuda.release(device, on.free, second));
  }
  on.finish(on.free);
  expect(std::memcmp(to.data(), from.data(), rounds * sizeof(uint32_t)) == 0, "each round reads what it has written");
  check(cuda.unpin(device, from.data()));
  check(cuda.unpin(device, to.data()));
}

// From the memory of one device into that of another, by a stream of the second.
void copies_between(const lightcc::CudaFunctions& cuda, int source, int target) {
  Streams at_source(cuda, source), at_target(cuda, target);
  std::vector<uint32_t> from(kBytes / sizeof(uint32_t), 7), to(from.size());
  check(cuda.pin(source, from.data(), kBytes));
  check(cuda.pin(target, to.data(), kBytes));
  void *there = at_source.allocate(at_source.free, kBytes), *here = at_target.allocate(at_target.free, kBytes);
  check(cuda.copy(source, at_source.free, there, from.data(), kBytes));
  check(cuda.record(source, at_source.event, at_source.free));
  check(cuda.order(target, at_target.free, at_source.event));
  check(cuda.copy(target, at_target.free, here, there, kBytes));
  check(cuda.copy(target, at_target.free, to.data(), here, kBytes));
  check(cuda.release(target, at_target.free, here));
  at_target.finish(at_target.free);
  check(cuda.release(source, at_source.free, there));
  at_source.finish(at_source.free);
  expect(from == to, "memory of another device arrives");
  check(cuda.unpin(source, from.data()));
  check(cuda.unpin(target, to.data()));
}

// Pieces of the first memory into the second, between which all stays as it is.
void copies_many(const lightcc::CudaFunctions& cuda, int device) {
  using lightcc::test::kCopyBytes;
  std::vector<std::byte> in = lightcc::test::copy_bytes(1), before = lightcc::test::copy_bytes(2), got(kCopyBytes);
  for (auto* bytes : {&in, &before, &got}) check(cuda.pin(device, bytes->data(), kCopyBytes));
  Streams on(cuda, device);
  auto* const from = static_cast<std::byte*>(on.allocate(on.free, kCopyBytes));
  auto* const to = static_cast<std::byte*>(on.allocate(on.free, kCopyBytes));
  check(cuda.copy(device, on.free, from, in.data(), kCopyBytes));
  size_t set = 0;
  for (const auto& cases : lightcc::test::copy_cases()) {
    std::vector<std::byte> want = before;
    std::vector<lightcc::CudaCopy> copies;
    for (const auto& [to_at, from_at, bytes] : cases) {
      copies.push_back({to + to_at, from + from_at, bytes});
      std::memcpy(&want[to_at], &in[from_at], bytes);
    }
    check(cuda.copy(device, on.free, to, before.data(), kCopyBytes));
    check(cuda.copy_all(device, on.free, copies.data(), copies.size()));
    check(cuda.copy(device, on.free, got.data(), to, kCopyBytes));
    on.finish(on.free);
    const size_t same = static_cast<size_t>(std::ranges::mismatch(got, want).in1 - got.begin());
    if (same < kCopyBytes) std::fprintf(stderr, "set %zu of %zu pieces: byte %zu is wrong\n", set, copies.size(), same);
    expect(same == kCopyBytes, "every byte of the pieces and no other is copied");
    ++set;
  }
  check(cuda.release(device, on.free, from));
  check(cuda.release(device, on.free, to));
  for (auto* bytes : {&in, &before, &got}) check(cuda.unpin(device, bytes->data()));
}

// `count` elements from element from_at into what lies from to_at on; what lies around them stays as it is.
void scales(Streams& on, lightcc::DType dtype, std::vector<std::byte>& in, std::vector<std::byte>& got, size_t from_at,
            size_t to_at, size_t count, double factor) {
  const size_t size = lightcc::size_of(dtype);
  std::vector<std::byte> want = in;
  void* const outputs[] = {want.data() + to_at * size};
  const void* const inputs[] = {in.data() + from_at * size};
  lightcc::reduce({dtype, lightcc::ReduceOp::sum, factor, 1}, outputs, inputs, count);

  auto* from = static_cast<std::byte*>(on.allocate(on.free, in.size()));
  auto* to = from_at == to_at ? from : static_cast<std::byte*>(on.allocate(on.free, in.size()));
  check(on.cuda.copy(on.device, on.free, from, in.data(), in.size()));
  if (to != from) check(on.cuda.copy(on.device, on.free, to, from, in.size()));
  check(on.cuda.scale(on.device, on.free, static_cast<int>(dtype), to + to_at * size, from + from_at * size, count,
                      factor));
  check(on.cuda.copy(on.device, on.free, got.data(), to, in.size()));
  check(on.cuda.release(on.device, on.free, from));
  if (to != from) check(on.cuda.release(on.device, on.free, to));
  on.finish(on.free);
  for (size_t i = 0; i < in.size(); i += size) {
    if (std::memcmp(&got[i], &want[i], size) == 0) continue;
    uint64_t comes = 0, wanted = 0, was = 0;
    std::memcpy(&comes, &got[i], size);
    std::memcpy(&wanted, &want[i], size);
    if (from_at == to_at) std::memcpy(&was, &in[i], size);
    std::fprintf(stderr, "%s times %g, %zu elements from %zu to %zu: at %zu (of %#lx) is %#lx, of reduce() %#lx\n",
                 lightcc::name_of(dtype), factor, count, from_at, to_at, i / size, was, comes, wanted);
    std::exit(1);
  }
}

void scales_as_the_cpu_does(const lightcc::CudaFunctions& cuda, int device) {
  Streams on(cuda, device);
  for (int i = 0; i < lightcc::kDTypes; ++i) {
    const auto dtype = static_cast<lightcc::DType>(i);
    std::vector<std::byte> in = lightcc::test::scale_elements(dtype), got(in.size());
    check(cuda.pin(device, in.data(), in.size()));
    check(cuda.pin(device, got.data(), got.size()));
    const size_t all = in.size() / lightcc::size_of(dtype);
    for (double factor : lightcc::test::scale_factors()) scales(on, dtype, in, got, 0, 0, all, factor);
    for (auto [from_at, to_at] : {std::pair(0, 0), {1, 1}, {15, 15}, {1, 0}, {0, 1}, {3, 19}})
      for (size_t count : {size_t(0), size_t(1), size_t(15), size_t(17), size_t(1000), all - 20})
        scales(on, dtype, in, got, from_at, to_at, count, 0.3);
    check(cuda.unpin(device, in.data()));
    check(cuda.unpin(device, got.data()));
  }
}

void names_the_bus(const lightcc::CudaFunctions& cuda, int devices) {
  for (int device = 0; device < devices; ++device) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device));
    char want[32] = {}, got[32] = {};
    std::snprintf(want, sizeof want, "%04X:%02X:%02X.0", properties.pciDomainID, properties.pciBusID,
                  properties.pciDeviceID);
    check(cuda.bus_id(device, got, sizeof got));
    expect(strcasecmp(got, want) == 0, want);
  }
  char id[32];
  expect_words(cuda.bus_id(devices, id, sizeof id), "cuDeviceGet: ", "CUDA_ERROR_INVALID_DEVICE");
}

}  // namespace

int main(int, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  using Table = const lightcc::CudaFunctions* (*)();
  const lightcc::CudaFunctions& cuda = *symbol<Table>(argv[1], "lightcc_cuda_functions")();
  expect(cuda.size == sizeof(lightcc::CudaFunctions), "the table is the one this was compiled with");
  int devices = 0;
  check(cuda.count_devices(&devices));
  expect(devices > 0 && !has_context(), "devices, and no context from counting them");
  int found = -1;
  char id[32];
  check(cuda.on_device(devices - 1, find_device, &found));
  check(cuda.bus_id(devices - 1, id, sizeof id));
  expect(found == devices - 1 && !has_context(), "the thread has the device for the function only");
  const int last = devices - 1;
  const auto run = [](const char* name, auto test) {
    std::printf("%s\n", name);
    test();
  };
  run("waits for nothing", [&] { waits_for_nothing(cuda, last); });
  run("fails in words", [&] { fails_in_words(cuda, last); });
  run("copies both ways", [&] { copies_both_ways(cuda, last); });
  run("keeps the device", [&] { keeps_the_device(cuda, devices); });
  run("captures go on", [&] { captures_go_on(cuda, last); });
  run("memory follows its stream", [&] { memory_follows_its_stream(cuda, last); });
  if (devices > 1) run("copies between", [&] { copies_between(cuda, 0, last); });
  run("copies many", [&] { copies_many(cuda, last); });
  run("scales as the CPU does", [&] { scales_as_the_cpu_does(cuda, last); });
  run("names the bus", [&] { names_the_bus(cuda, devices); });
  std::printf("%d GPUs: ok\n", devices);
}
