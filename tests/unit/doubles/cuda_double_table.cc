// The functions of the table that a CudaDouble fills.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "cuda_double.h"
#include "device/cuda/codec_pieces.h"
#include "device/device.h"
#include "unit/device/cuda/host_grid.h"

namespace lightcc::test {
namespace {

thread_local int device_of_thread = -1;

size_t codec_bytes_of_int8(size_t count) { return gpu::groups_of(count) * sizeof(float) + count; }
size_t codec_bytes_of_topk(size_t count, size_t k, DType width) {
  return blocks_of(count) * sizeof(uint32_t) + k * (sizeof(uint16_t) + size_of(width));
}

// By the kernels' own code.
void encode_as_on_a_gpu(bool is_topk, const std::vector<CudaEncode>& pieces, uint32_t seed) {
  if (is_topk) {
    auto all = gpu::pieces_of<gpu::EncodePiece>(pieces.data(), pieces.size());
    run_on_host<gpu::EncodeBatch>(all, seed);
  } else {
    auto all = gpu::pieces_of<gpu::Int8EncodePiece>(pieces.data(), pieces.size());
    run_on_host<gpu::Int8EncodeBatch>(all, seed);
  }
}
void decode_as_on_a_gpu(bool is_topk, const std::vector<CudaDecode>& pieces, uint64_t* error, uint32_t seed) {
  if (is_topk) {
    auto all = gpu::pieces_of<gpu::DecodePiece>(pieces.data(), pieces.size());
    gpu::DecodeBatch batch{};
    batch.error = error;
    run_on_host<gpu::DecodeBatch>(all, seed, batch);
  } else {
    auto all = gpu::pieces_of<gpu::Int8DecodePiece>(pieces.data(), pieces.size());
    run_on_host<gpu::Int8DecodeBatch>(all, seed);
  }
}

}  // namespace

int CudaDouble::current_device() { return device_of_thread; }

void* CudaDouble::create_stream(int device) {
  check_device(device);
  void* handle = reinterpret_cast<void*>(++handles);
  auto stream = std::make_unique<Stream>();
  stream->device = device, stream->index = streams_made_++;
  stream->name = "stream " + std::to_string(++streams_of_device_[size_t(device)]);
  streams_[{device, handle}] = std::move(stream);
  return handle;
}

void CudaDouble::destroy_stream(int device, void* handle) {
  Stream& stream = stream_of(device, handle);
  if (!handle) refuse("the default stream cannot be destroyed");
  stream.is_ending = true;  // after what it has
  stream.wake.notify_all();
  destroyed_.push_back(std::move(streams_.extract({device, handle}).mapped()));
}

void CudaDouble::order(int device, void* handle, void* event) {
  Stream& stream = stream_of(device, handle);
  const std::shared_ptr<Record> record = event_of(event).latest;
  if (!record || ignores_order_) return;
  stream.clock.join(record->clock);
  queue(stream, {[this, record] {
    Lock lock(mutex_);
    wait(lock, "an event", [&] { return record->is_reached; });
  }});
}

void CudaDouble::call(int device, void* handle, void (*function)(void*), void* argument) {
  Stream& stream = stream_of(device, handle);
  queue(stream, {[=, this, clock = stream.clock] {
    {
      std::lock_guard lock(mutex_);
      history_.host_knows(clock);
    }
    is_called_function = true;
    function(argument);
    is_called_function = false;
  }});
}

void CudaDouble::pin(int device, void* begin, size_t bytes) {
  check_device(device);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const auto next = pinned_.lower_bound(address + bytes);
  const bool overlaps = next != pinned_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (!begin || bytes == 0 || overlaps) throw std::runtime_error("the memory is pinned already, or none");
  pinned_[address] = {device, bytes};
}

void CudaDouble::copy(int device, void* handle, void* to, const void* from, size_t bytes) {
  Stream& stream = stream_of(device, handle);
  if (bytes == 0) return;
  const std::string what = "a copy on " + stream.name, who = what + " of device " + std::to_string(device);
  Uses sides;
  bool is_of_device = false;
  for (const void* side : {from, static_cast<const void*>(to)}) {
    Range* range = range_of(memory_, side, bytes);
    if (range && range->device == device) is_of_device = true;
    if (!range) range = range_of(pinned_, side, bytes);
    if (!range) refuse(who + " has a side that is neither a device's memory nor pinned");
    sides.push_back(range);
  }
  if (!is_of_device) refuse(who + " has no side that is the device's memory");
  const auto move = [=](size_t begin, size_t end) {
    return [=] { move_bytes(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin); };
  };
  queue_access(stream, what, {{from, bytes, false}, {to, bytes, true}}, {move(0, bytes / 2), move(bytes / 2, bytes)},
               std::move(sides));
}

void CudaDouble::copy_all(int device, void* handle, std::vector<CudaCopy> copies) {
  Stream& stream = stream_of(device, handle);
  std::erase_if(copies, [](const CudaCopy& copy) { return copy.bytes == 0; });
  if (copies.empty()) return;
  const std::string what = "a batch of copies on " + stream.name, who = what + " of device " + std::to_string(device);
  std::vector<Access> accesses;
  Uses sides;
  for (const CudaCopy& copy : copies)
    for (const Access& side : {Access{copy.from, copy.bytes, false}, Access{copy.to, copy.bytes, true}}) {
      Range* range = range_of(memory_, side.begin, side.bytes);
      if (!range || range->device != device) refuse(who + " has a side that is not the device's memory");
      sides.push_back(range);
      accesses.push_back(side);
    }
  // By address, each is compared with the one of those before it that ends last: of the written ones and of all.
  std::vector<Access> sorted = accesses;
  std::ranges::sort(sorted, {}, [](const Access& access) { return reinterpret_cast<uintptr_t>(access.begin); });
  uintptr_t written_end = 0, end = 0;
  for (const Access& side : sorted) {
    const auto begin = reinterpret_cast<uintptr_t>(side.begin);
    if (begin < (side.writes ? end : written_end)) refuse(who + " writes what it also reads, or writes twice");
    end = std::max(end, begin + side.bytes);
    if (side.writes) written_end = std::max(written_end, begin + side.bytes);
  }
  const auto move = [copies](bool second) {  // halves
    return [=] {
      for (const auto& [to, from, bytes] : copies) {
        const size_t begin = second ? bytes / 2 : 0, end = second ? bytes : bytes / 2;
        move_bytes(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
      }
    };
  };
  queue_access(stream, what, accesses, {move(false), move(true)}, std::move(sides));
}

void CudaDouble::scale(int device, void* handle, int dtype, void* to, const void* from, size_t count, double factor) {
  Stream& stream = stream_of(device, handle);
  const std::string what = "a scaling on " + stream.name, who = what + " of device " + std::to_string(device);
  if (dtype < 0 || dtype >= kDTypes) refuse(who + " is of no dtype there is");
  if (count == 0) return;
  const Reduction reduction{DType(dtype), ReduceOp::sum, factor};
  const size_t bytes = count * size_of(reduction.dtype);
  const std::vector<Access> accesses{{from, bytes, false}, {to, bytes, true}};
  Uses uses = uses_of(device, who, accesses);
  queue_access(stream, what, accesses, {[=] {
    std::vector<std::byte> values(bytes);  // which reduce() may read and write as it likes
    move_bytes(values.data(), from, bytes);
    reduce(reduction, {{values.data()}}, {{values.data()}}, count);
    move_bytes(to, values.data(), bytes);
  }}, std::move(uses));
}

// What kernels of codecs read and write; of a pair, which is which is known only once they run.
void CudaDouble::encode(int device, void* handle, int codec, const std::vector<CudaEncode>& pieces) {
  Stream& stream = stream_of(device, handle);
  const std::string what = "an encoding on " + stream.name, who = what + " of device " + std::to_string(device);
  const bool is_topk = codec == int(CodecKind::topk);
  if (!is_topk && codec != int(CodecKind::int8)) refuse(who + " is of no codec there is");
  std::vector<Access> accesses;
  std::vector<std::pair<void*, size_t>> bodies;
  for (const CudaEncode& piece : pieces) {
    if (piece.count == 0) continue;
    const DType width = piece.half ? DType::float16 : DType::float32;
    accesses.push_back({piece.gradient, piece.count * size_of(DType(piece.dtype)), false});
    for (float* const* pair : {piece.residual, piece.velocity})
      for (int i = 0; i < 2; ++i)
        if (pair[i]) accesses.push_back({pair[i], piece.count * sizeof(float), true});
    accesses.push_back({piece.state, kCodecStateBytes, true});
    bodies.push_back({piece.body, is_topk ? codec_bytes_of_topk(piece.count, piece.k, width)
                                          : codec_bytes_of_int8(piece.count)});
    accesses.push_back({piece.body, bodies.back().second, true});
  }
  if (accesses.empty()) return;
  Uses uses = uses_of(device, who, accesses);
  const uint32_t seed = uint32_t(random_());
  const bool forges = forging_device_ == device;
  queue_access(stream, what, accesses, {[=] {
    encode_as_on_a_gpu(is_topk, pieces, seed);
    for (auto [body, bytes] : bodies)
      if (forges) std::memset(body, 0xff, bytes);
  }}, std::move(uses));
}

void CudaDouble::decode(int device, void* handle, int codec, const std::vector<CudaDecode>& pieces, uint64_t* error) {
  Stream& stream = stream_of(device, handle);
  const std::string what = "a decoding on " + stream.name, who = what + " of device " + std::to_string(device);
  const bool is_topk = codec == int(CodecKind::topk);
  if (!is_topk && codec != int(CodecKind::int8)) refuse(who + " is of no codec there is");
  std::vector<Access> accesses;
  if (is_topk) accesses.push_back({error, sizeof *error, true});
  for (const CudaDecode& piece : pieces) {
    if (piece.count == 0) continue;
    const DType width = piece.half ? DType::float16 : DType::float32;
    const size_t bytes =
        is_topk ? codec_bytes_of_topk(piece.count, piece.k, width) : codec_bytes_of_int8(piece.count);
    for (unsigned node = 0; node < piece.nodes; ++node)
      accesses.push_back({static_cast<const char*>(piece.bodies) + node * piece.stride, bytes, false});
    accesses.push_back({piece.out, piece.count * size_of(DType(piece.dtype)), true});
  }
  if (accesses.empty()) return;
  Uses uses = uses_of(device, who, accesses);
  const uint32_t seed = uint32_t(random_());
  queue_access(stream, what, accesses, {[=] { decode_as_on_a_gpu(is_topk, pieces, error, seed); }}, std::move(uses));
}

struct CudaDouble::Table {
  // What has failed stays valid in this thread until its next call.
  template <class Body>
  static const char* attempt(const char* function, Body body) {
    static thread_local char words[256];  // still there when the process ends
    CudaDouble* one = CudaDouble::current;
    const std::string failure =
        one ? one->attempt(function, [&](Lock& lock) { body(*one, lock); }) : "there is no CudaDouble";
    words[failure.copy(words, sizeof words - 1)] = 0;
    return failure.empty() ? nullptr : words;
  }

  static const char* count_devices(int* count) {
    return attempt("count_devices", [=](CudaDouble& one, Lock&) { *count = one.devices_; });
  }
  static const char* refuse_stream(int, void* stream) {
    return stream == reinterpret_cast<void*>(2) ? "a stream that cannot take part" : nullptr;
  }
  static const char* create_stream(int device, void** stream) {
    return attempt("create_stream", [=](CudaDouble& one, Lock&) { *stream = one.create_stream(device); });
  }
  static const char* destroy_stream(int device, void* stream) {
    return attempt("destroy_stream", [=](CudaDouble& one, Lock&) { one.destroy_stream(device, stream); });
  }
  static const char* create_event(int device, void** event) {
    return attempt("create_event", [=](CudaDouble& one, Lock&) {
      one.check_device(device);
      *event = reinterpret_cast<void*>(++handles);
      one.events_[*event] = {device, nullptr};
    });
  }
  static const char* destroy_event(int, void* event) {
    return attempt("destroy_event", [=](CudaDouble& one, Lock&) {
      one.event_of(event);
      one.events_.erase(event);
    });
  }
  static const char* record(int device, void* event, void* stream) {
    return attempt("record", [=](CudaDouble& one, Lock&) {
      Event& recorded = one.event_of(event);
      Stream& from = one.stream_of(device, stream);
      if (recorded.device != device) one.refuse("an event of another device is recorded");
      recorded.latest = one.queue_record(from);
    });
  }
  static const char* order(int device, void* stream, void* event) {
    return attempt("order", [=](CudaDouble& one, Lock&) { one.order(device, stream, event); });
  }
  static const char* query(int, void* event, int* reached) {
    return attempt("query", [=](CudaDouble& one, Lock&) {
      const Event& asked = one.event_of(event);
      *reached = !asked.latest || asked.latest->is_reached;
      if (asked.latest && *reached) one.history_.host_knows(asked.latest->clock);
    });
  }
  static const char* call(int device, void* stream, void (*function)(void*), void* argument) {
    return attempt("call", [=](CudaDouble& one, Lock&) { one.call(device, stream, function, argument); });
  }
  static const char* pin(int device, void* begin, size_t bytes) {
    return attempt("pin", [=](CudaDouble& one, Lock&) { one.pin(device, begin, bytes); });
  }
  static const char* unpin(int, void* begin) {
    return attempt("unpin", [=](CudaDouble& one, Lock& lock) { one.forget(lock, one.pinned_, begin, "unpins"); });
  }
  static const char* copy(int device, void* stream, void* to, const void* from, size_t bytes) {
    return attempt("copy", [=](CudaDouble& one, Lock&) { one.copy(device, stream, to, from, bytes); });
  }
  static const char* copy_all(int device, void* stream, const CudaCopy* copies, size_t count) {
    return attempt("copy_all",
                   [=](CudaDouble& one, Lock&) { one.copy_all(device, stream, {copies, copies + count}); });
  }
  static const char* allocate(int device, void* stream, size_t bytes, void** memory) {
    return attempt("allocate",
                   [=](CudaDouble& one, Lock&) { *memory = one.allocate_in_order(device, stream, bytes); });
  }
  static const char* release(int device, void* stream, void* memory) {
    return attempt("release", [=](CudaDouble& one, Lock&) { one.release_in_order(device, stream, memory); });
  }
  static const char* scale(int device, void* stream, int dtype, void* to, const void* from, size_t count,
                           double factor) {
    return attempt("scale",
                   [=](CudaDouble& one, Lock&) { one.scale(device, stream, dtype, to, from, count, factor); });
  }
  static const char* on_device(int device, void (*function)(void*), void* argument) {
    const char* failure = attempt("on_device", [=](CudaDouble& one, Lock&) { one.check_device(device); });
    if (failure) return failure;
    const int before = std::exchange(device_of_thread, device);
    function(argument);
    device_of_thread = before;
    return nullptr;
  }
  static const char* bus_id(int device, char* id, size_t bytes) {
    return attempt("bus_id", [=](CudaDouble& one, Lock&) {
      one.check_device(device);
      const std::string text = "double:" + std::to_string(device);
      if (bytes <= text.size()) one.refuse("a bus id has no room in " + std::to_string(bytes) + " bytes");
      id[text.copy(id, text.size())] = 0;
    });
  }
  static const char* encode(int device, void* stream, int codec, const CudaEncode* pieces, size_t count) {
    return attempt("encode",
                   [=](CudaDouble& one, Lock&) { one.encode(device, stream, codec, {pieces, pieces + count}); });
  }
  static const char* decode(int device, void* stream, int codec, const CudaDecode* pieces, size_t count,
                            uint64_t* error) {
    return attempt(
        "decode", [=](CudaDouble& one, Lock&) { one.decode(device, stream, codec, {pieces, pieces + count}, error); });
  }
  static const char* load_codecs(int device) {
    return attempt("load_codecs", [=](CudaDouble& one, Lock&) { one.check_device(device); });
  }
  static const char* load_kernels(int device) {
    return attempt("load_kernels", [=](CudaDouble& one, Lock&) { one.check_device(device); });
  }
};

const CudaFunctions& CudaDouble::functions() {
  static constexpr CudaFunctions table{.size = sizeof(CudaFunctions),
                                       .count_devices = Table::count_devices,
                                       .refuse_stream = Table::refuse_stream,
                                       .create_stream = Table::create_stream,
                                       .destroy_stream = Table::destroy_stream,
                                       .create_event = Table::create_event,
                                       .destroy_event = Table::destroy_event,
                                       .record = Table::record,
                                       .order = Table::order,
                                       .query = Table::query,
                                       .call = Table::call,
                                       .pin = Table::pin,
                                       .unpin = Table::unpin,
                                       .copy = Table::copy,
                                       .copy_all = Table::copy_all,
                                       .allocate = Table::allocate,
                                       .release = Table::release,
                                       .scale = Table::scale,
                                       .on_device = Table::on_device,
                                       .bus_id = Table::bus_id,
                                       .load_kernels = Table::load_kernels,
                                       .encode = Table::encode,
                                       .decode = Table::decode,
                                       .load_codecs = Table::load_codecs};
  return table;
}

}  // namespace lightcc::test
