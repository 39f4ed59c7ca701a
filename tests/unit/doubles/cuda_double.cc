#include "cuda_double.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace lightcc::test {
namespace {

constexpr std::chrono::seconds kPatience{30};  // longer than a kernel of NCCL waits for others
constexpr double kLeastSleepUs = 5;  // shorter sleeps take longer
constexpr auto kAlignment = std::align_val_t(256);  // as cudaMalloc's

uint64_t new_seed() {
  const char* given = std::getenv("LIGHTCC_TEST_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : 0;
  return seed ? seed : std::random_device{}();
}

template <class T>
void move_atomically(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<T*>(to);
  auto* source = static_cast<T*>(const_cast<void*>(from));
  for (size_t i = 0; i < bytes / sizeof(T); ++i)
    std::atomic_ref(target[i]).store(std::atomic_ref(source[i]).load(std::memory_order_relaxed),
                                     std::memory_order_relaxed);
}

void* new_memory(size_t bytes) { return ::operator new[](bytes, kAlignment); }
void free_memory(void* memory) { ::operator delete[](memory, kAlignment); }

}  // namespace

std::atomic<CudaDouble*> CudaDouble::current{nullptr};
std::atomic<uintptr_t> CudaDouble::handles{0x10000};
thread_local bool CudaDouble::is_called_function = false;

void move_bytes(void* to, const void* from, size_t bytes) {
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % sizeof(uint64_t) == 0;
  const size_t in_words = aligned ? bytes / sizeof(uint64_t) * sizeof(uint64_t) : 0;
  move_atomically<uint64_t>(to, from, in_words);
  move_atomically<uint8_t>(static_cast<uint8_t*>(to) + in_words, static_cast<const uint8_t*>(from) + in_words,
                           bytes - in_words);
}

CudaDouble::CudaDouble(int devices)
    : devices_(devices), seed_(new_seed()), random_(seed_), streams_of_device_(size_t(devices)) {
  for (int device = 0; device < devices; ++device) {
    auto stream = std::make_unique<Stream>();
    stream->device = device, stream->name = "the default stream", stream->index = streams_made_++;
    streams_[{device, nullptr}] = std::move(stream);
  }
  CudaDouble* none = nullptr;
  if (!current.compare_exchange_strong(none, this)) throw std::logic_error("there is another CudaDouble");
}

CudaDouble::~CudaDouble() {
  {
    Lock lock(mutex_);
    for (auto& [handle, stream] : streams_) destroyed_.push_back(std::move(stream));
    streams_.clear();
    for (auto& stream : destroyed_) stream->is_ending = true, stream->wake.notify_all();
    wait(lock, "what is queued", [&] {
      return std::none_of(destroyed_.begin(), destroyed_.end(), [](auto& stream) { return stream->is_running; });
    });
  }
  for (auto& stream : destroyed_)
    if (stream->thread.joinable()) stream->thread.join();
  current = nullptr;
  for (auto& [begin, range] : memory_) free_memory(reinterpret_cast<void*>(begin));
}

void CudaDouble::set_max_delay_us(double max_delay_us) {
  std::lock_guard lock(mutex_);
  max_delay_us_ = max_delay_us;
}

void CudaDouble::fail(const std::string& function, int calls, bool is_sticky) {
  std::lock_guard lock(mutex_);
  failures_[function] = {calls, is_sticky};
}

void CudaDouble::forge_messages(int device) {
  std::lock_guard lock(mutex_);
  forging_device_ = device;
}

void CudaDouble::ignore_order(bool ignored) {
  std::lock_guard lock(mutex_);
  ignores_order_ = ignored;
}

// Faults

std::vector<std::string> CudaDouble::faults() const {
  std::lock_guard lock(mutex_);
  return faults_;
}

size_t CudaDouble::pinned_bytes() const {
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const auto& [begin, range] : pinned_) bytes += range.bytes;
  return bytes;
}

uint64_t CudaDouble::calls(const std::string& function) const {
  std::lock_guard lock(mutex_);
  const auto found = calls_.find(function);
  return found == calls_.end() ? 0 : found->second;
}

void CudaDouble::report(const std::string& fault) {
  std::lock_guard lock(mutex_);
  add_fault(fault);
}

void CudaDouble::add_fault(const std::string& fault) {
  if (std::find(faults_.begin(), faults_.end(), fault) == faults_.end()) faults_.push_back(fault);
}

void CudaDouble::refuse(const std::string& why) {
  add_fault(why);
  throw std::runtime_error(why);
}

// Runs the body under the lock; returns what has failed.
std::string CudaDouble::attempt(const std::string& function, const std::function<void(Lock&)>& body) {
  Lock lock(mutex_);
  ++calls_[function];
  if (is_called_function) add_fault("a function that CUDA calls uses CUDA (" + function + ")");
  if (const auto planted = failures_.find(function); planted != failures_.end() && --planted->second.calls <= 0) {
    if (!planted->second.is_sticky) failures_.erase(planted);
    return "planted";
  }
  try {
    body(lock);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void CudaDouble::check_device(int device) {
  if (device < 0 || device >= devices_) refuse("there is no device " + std::to_string(device));
}

CudaDouble::Stream& CudaDouble::stream_of(int device, void* handle) {
  check_device(device);
  const auto found = streams_.find({device, handle});
  if (found == streams_.end()) refuse("device " + std::to_string(device) + " has no such stream, or no longer");
  return *found->second;
}

CudaDouble::Event& CudaDouble::event_of(void* handle) {
  const auto found = events_.find(handle);
  if (found == events_.end()) refuse("there is no such event, or no longer");
  return found->second;
}

// Order

void CudaDouble::host_access(const Access& access, const std::string& verb) {
  std::lock_guard lock(mutex_);
  check_access({"the host", -1}, {}, access, verb);
}

void CudaDouble::check_access(const Actor& actor, const VectorClock& clock, const Access& access,
                              const std::string& verb) {
  for (const std::string& fault : history_.conflicts(actor, clock, access, verb)) add_fault(fault);
}

// Memory

void* CudaDouble::allocate(int device, size_t bytes) {
  void* memory = nullptr;
  attempt("allocate at once", [&](Lock&) {
    check_device(device);
    memory = new_memory(std::max(bytes, size_t(1)));
    std::memset(memory, 0xff, bytes);
    memory_[reinterpret_cast<uintptr_t>(memory)] = {device, bytes};
  });
  return memory;
}

void CudaDouble::release(void* memory) {
  attempt("release at once", [&](Lock& lock) {
    forget(lock, memory_, memory, "releases");
    free_memory(memory);
  });
}

void* CudaDouble::allocate_in_order(int device, void* handle, size_t bytes) {
  Stream& stream = stream_of(device, handle);
  bytes = std::max(bytes, size_t(1));
  void* memory = new_memory(bytes);
  Range& range = memory_[reinterpret_cast<uintptr_t>(memory)] = {device, bytes, true};
  queue_access(stream, "an allocation on " + stream.name, {{memory, bytes, true}}, {[=] {
    move_bytes(memory, std::string(bytes, '\xff').data(), bytes);
  }}, {&range});
  return memory;
}

// For what is queued later it is gone now. Nothing is known of its accesses any more: whoever is given its place is
// ordered behind them.
void CudaDouble::release_in_order(int device, void* handle, void* memory) {
  Stream& stream = stream_of(device, handle);
  const auto found = memory_.find(reinterpret_cast<uintptr_t>(memory));
  const std::string what = "a release on " + stream.name;
  if (found == memory_.end() || found->second.device != device || !found->second.is_of_stream)
    refuse(what + " of device " + std::to_string(device) + " is of what is no such memory, or no longer");
  Range& range = released_.insert(memory_.extract(found)).position->second;
  queue_access(stream, what, {{memory, range.bytes, true}}, {[] {}}, {&range});
  history_.forget(memory, range.bytes);
}

void CudaDouble::give_back_released() {
  std::erase_if(released_, [](const auto& released) {
    if (released.second.unfinished == 0) free_memory(reinterpret_cast<void*>(released.first));
    return released.second.unfinished == 0;
  });
}

// All of it, or nullptr.
CudaDouble::Range* CudaDouble::range_of(Ranges& ranges, const void* begin, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return nullptr;
  --found;
  return address + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

// It is a fault if the host does not know that all operations with it are done; those find their memory nevertheless.
void CudaDouble::forget(Lock& lock, Ranges& ranges, const void* begin, const std::string& verb) {
  auto node = ranges.extract(reinterpret_cast<uintptr_t>(begin));
  if (!node) refuse("the host " + verb + " what is no such memory, or no longer");
  const Access all{begin, node.mapped().bytes, true};
  check_access({"the host", -1}, {}, all, verb);
  history_.forget(begin, all.bytes);
  wait(lock, "operations on memory that the host " + verb, [&] { return node.mapped().unfinished == 0; });
}

// Streams

void CudaDouble::queue(Stream& stream, Steps steps, Uses uses) {
  if (stream.is_promised)
    add_fault(stream.name + " of device " + std::to_string(stream.device) +
              " is given something before the kernel that was promised it");
  Operation operation{std::move(steps), {}, std::move(uses)};
  for (size_t i = 0; i < operation.steps.size(); ++i)  // most are short
    operation.delays.emplace_back(max_delay_us_ * std::pow(std::uniform_real_distribution<>()(random_), 4));
  for (Range* range : operation.uses) ++range->unfinished;
  stream.queue.push_back(std::move(operation));
  if (!stream.is_running) stream.is_running = true, stream.thread = std::thread([this, &stream] { work(stream); });
  stream.wake.notify_all();
}

void CudaDouble::queue_access(Stream& stream, const std::string& what, const std::vector<Access>& accesses, Steps steps,
                              Uses uses) {
  stream.clock.advance(stream.index);
  const Actor actor{what, stream.device, stream.index};
  for (const Access& access : accesses)
    check_access(actor, stream.clock, access, access.writes ? "writes" : "reads");
  for (const Access& access : accesses) history_.add(actor, stream.clock, access);
  queue(stream, std::move(steps), std::move(uses));
}

std::shared_ptr<CudaDouble::Record> CudaDouble::queue_record(Stream& stream) {
  auto record = std::make_shared<Record>(Record{stream.clock});
  queue(stream, {[this, record] {
    std::lock_guard lock(mutex_);
    record->is_reached = true;
    changed_.notify_all();
  }});
  return record;
}

void CudaDouble::work(Stream& stream) {
  Lock lock(mutex_);
  for (;;) {
    stream.wake.wait(lock, [&] { return !stream.queue.empty() || stream.is_ending; });
    if (stream.queue.empty()) break;
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    lock.unlock();
    for (size_t i = 0; i < operation.steps.size(); ++i) {
      if (operation.delays[i].count() >= kLeastSleepUs) std::this_thread::sleep_for(operation.delays[i]);
      operation.steps[i]();
    }
    operation.steps.clear();  // what they hold may need the lock
    lock.lock();
    for (Range* range : operation.uses) --range->unfinished;
    give_back_released();
    changed_.notify_all();
  }
  stream.is_running = false;
  changed_.notify_all();
}

void CudaDouble::wait(Lock& lock, const std::string& what, const std::function<bool()>& condition) {
  if (changed_.wait_for(lock, kPatience, condition)) return;
  std::fprintf(stderr, "CudaDouble: waited 30 s in vain for %s (seed %llu)\n", what.c_str(),
               static_cast<unsigned long long>(seed_));
  std::abort();
}

CudaDouble::Uses CudaDouble::uses_of(int device, const std::string& who, const std::vector<Access>& accesses) {
  Uses uses;
  for (const Access& access : accesses) {
    Range* range = range_of(memory_, access.begin, access.bytes);
    if (!range || range->device != device) range = range_of(pinned_, access.begin, access.bytes);
    if (!range)
      refuse(who + " of device " + std::to_string(device) + " uses " + std::to_string(access.bytes) +
             " bytes that are neither the device's nor pinned");
    uses.push_back(range);
  }
  return uses;
}

bool CudaDouble::promise(int device, void* handle) {
  return attempt("promise", [&](Lock&) {
    Stream& stream = stream_of(device, handle);
    if (stream.is_promised)
      add_fault(stream.name + " of device " + std::to_string(device) + " is promised two kernels");
    stream.is_promised = true;
  }).empty();
}

bool CudaDouble::run(int device, void* handle, const std::string& what, std::vector<Access> accesses,
                     std::function<void()> body, bool was_promised) {
  return attempt("run", [&](Lock&) {
    Stream& stream = stream_of(device, handle);
    if (was_promised) stream.is_promised = false;
    const std::string who = what + " on " + stream.name;
    Uses uses = uses_of(device, who, accesses);
    queue_access(stream, who, accesses, {std::move(body)}, std::move(uses));
  }).empty();
}

void CudaDouble::fill(int device, void* stream, float* to, size_t count, float value) {
  run(device, stream, "a kernel", {{to, count * sizeof(float), true}}, [=] {
    for (size_t i = 0; i < count; ++i) std::atomic_ref(to[i]).store(value, std::memory_order_relaxed);
  });
}

void CudaDouble::synchronize(int device, void* stream) {
  attempt("synchronize", [&](Lock& lock) {
    const auto record = queue_record(stream_of(device, stream));
    wait(lock, "a stream", [&] { return record->is_reached; });
    history_.host_knows(record->clock);
  });
}

}  // namespace lightcc::test
