#include "device/cuda/codec_tables.h"

#include <algorithm>
#include <cstring>

#include "device/cuda/gpu.h"

namespace lightcc {
namespace {

constexpr size_t kLeastBytes = size_t(64) << 10;  // the pieces of a model of some hundred tensors

}  // namespace

CodecTables::Pinned& CodecTables::make(const DriverFunctions& driver, size_t bytes) {
  auto made = std::make_unique<Pinned>();
  made->bytes = std::max(kLeastBytes, bytes + bytes / 2);
  made->memory = std::make_unique<std::byte[]>(made->bytes);
  check_driver(driver.EventCreate(&made->event, kEventDisableTiming), "cuEventCreate");
  const int status = driver.MemHostRegister(made->memory.get(), made->bytes, kHostRegisterPortable);
  if (status != kCudaSuccess) driver.EventDestroy(made->event);
  check_driver(status, "cuMemHostRegister");
  return *all_.emplace_back(std::move(made));
}

CodecTables::Pinned& CodecTables::take(const DriverFunctions& driver, size_t bytes) {
  for (const auto& one : all_)
    if (one->bytes >= bytes && (!one->is_used || driver.EventQuery(one->event) == kCudaSuccess)) return *one;
  return make(driver, bytes);
}

void CodecTables::make_ready(const DriverFunctions& driver) {
  std::lock_guard lock(mutex_);
  if (all_.empty()) make(driver, kLeastBytes);
}

void CodecTables::copy(const DriverFunctions& driver, void* stream, void* to, const void* table, size_t bytes) {
  std::lock_guard lock(mutex_);
  Pinned& one = take(driver, bytes);
  std::memcpy(one.memory.get(), table, bytes);
  one.is_used = true;
  check_driver(driver.MemcpyAsync(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(one.memory.get()), bytes,
                                  stream),
               "cuMemcpyAsync of the pieces");
  check_driver(driver.EventRecord(one.event, stream), "cuEventRecord");
}

}  // namespace lightcc
