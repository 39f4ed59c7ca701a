#include "engine/request/gpu_streams.h"

#include <cstring>
#include <vector>

#include "base/log.h"

namespace lightcc {
namespace {

template <class Body> void queue_on_device(Body body) {
  try {
    body();
  } catch (const Error& error) {
    throw DeviceFailed(error.code(), error.what());
  }
}

}  // namespace

void order_own_stream(const Request& request) {
  if (request.delivered) request.delivered->order_once(request.place.device, request.place.stream);
}

const CudaFunctions& GpuStreams::functions_for(const Request& request) {
  const auto refuse = [&](const std::string& why) {
    throw Error(Code::invalid_argument, request.title() + " on rank " + std::to_string(rank_) + ": " + why);
  };
  const CudaFunctions& functions = cuda(cuda_library_);
  if (gpus_ < 0) {
    int count = 0;
    if (const char* failure = functions.count_devices(&count)) refuse(failure);
    gpus_ = count;
  }
  const int device = request.place.device;
  if (device < 0 || device >= gpus_)
    refuse("there is no GPU " + std::to_string(device) + ", but " + std::to_string(gpus_) + " in all");
  if (const char* why = functions.refuse_stream(device, request.place.stream)) refuse(why);
  return functions;
}

// The first call of a device compiles them, which takes seconds: here, where nobody waits but the caller.
bool GpuStreams::has_codec(const Request& request) {
  const CodecKind kind = request.what.codec.kind;
  if (!compresses_ || (kind != CodecKind::topk && kind != CodecKind::int8)) return false;
  const int device = request.place.device;
  const CudaFunctions& functions = functions_for(request);
  std::lock_guard lock(mutex_);
  if (const auto known = codecs_.find(device); known != codecs_.end()) return known->second;
  const char* const failure = functions.load_codecs(device);
  if (failure)
    log(Level::info, "compressed all-reduces of tensors of GPU " + std::to_string(device) + " of rank " +
             std::to_string(rank_) + " go through the host: " + failure);
  return codecs_[device] = failure == nullptr;
}

void GpuStreams::note(Request& request, Mark* last) {
  request.delivered = nullptr;
  request.nccl = nullptr;
  request.encodes = false;
  if (request.place.kind == DeviceKind::cpu) return;
  request.encodes = has_codec(request);
  if (last && last->event && last->place == request.place) {
    request.ready = last->event;
    return;
  }
  const CudaFunctions& functions = functions_for(request);
  queue_on_device([&] {
    request.ready = std::make_shared<CudaEvent>(functions, request.place.device);
    request.ready->record(request.place.stream);
  });
  if (last) *last = {request.place, request.ready};
}

void GpuStreams::fill(std::span<const Fill> fills) {
  std::vector<CudaCopy> copies;
  const Request* first = nullptr;  // of these
  const auto queue = [&] {
    if (copies.empty()) return;
    const auto& [kind, device, stream] = first->place;
    const CudaFunctions& functions = functions_for(*first);
    queue_on_device([&, device = device, stream = stream] {
      check_cuda(functions.copy_all(device, stream, copies.data(), copies.size()), "copying tensors", device);
    });
    copies.clear();
  };
  for (const auto& [request, from] : fills) {
    if (request->outputs.size() != 1 || request->inputs[0] != request->outputs[0])
      throw Error(Code::invalid_argument, request->title() + " cannot be filled: it is not one tensor in place");
    const size_t bytes = bytes_of(request->what);
    if (request->place.kind == DeviceKind::cpu) {
      std::memcpy(request->outputs[0], from, bytes);
      continue;
    }
    if (first && request->place != first->place) queue();
    first = request.get();
    copies.push_back({request->outputs[0], from, bytes});
  }
  queue();
}

}  // namespace lightcc
