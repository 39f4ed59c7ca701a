// What the engine does with a request of a GPU in the thread that submits it.
#include "device/cuda_objects.h"
#include "engine/engine.h"

namespace lightcc {

// Of a request of a GPU: what its stream has been given so far. A device that fails here has failed in the program,
// which nobody else can go on without.
void Engine::note_stream(Request& request) {
  request.delivered = nullptr;
  request.by_nccl = false;
  if (request.place.kind == DeviceKind::cpu) return;
  const auto [kind, device, stream] = request.place;
  const auto refuse = [&, rank = world_.rank](const std::string& why) {
    throw Error(Code::invalid_argument, request.title() + " on rank " + std::to_string(rank) + ": " + why);
  };
  const CudaFunctions& functions = cuda(config_.cuda_library);
  if (gpus_ < 0) {
    int count = 0;
    if (const char* failure = functions.count_devices(&count)) refuse(failure);
    gpus_ = count;
  }
  if (device < 0 || device >= gpus_)
    refuse("there is no GPU " + std::to_string(device) + ", but " + std::to_string(gpus_) + " in all");
  if (const char* why = functions.refuse_stream(device, stream)) refuse(why);
  try {
    request.ready = std::make_shared<CudaEvent>(functions, device);
    request.ready->record(stream);
  } catch (const Error& error) {
    with_peers([&](Peers&) { throw error; });
    throw;
  }
}

}  // namespace lightcc
