// What the engine does with a request of a GPU in the thread that submits it.
#include <algorithm>
#include <cstring>

#include "device/cuda_objects.h"
#include "engine/engine_impl.h"

namespace lightcc {

// Refuses a GPU that is not there, and a stream that cannot take part.
const CudaFunctions& Engine::Impl::functions_for(const Request& request) {
  const auto refuse = [&, rank = world_.rank](const std::string& why) {
    throw Error(Code::invalid_argument, request.title() + " on rank " + std::to_string(rank) + ": " + why);
  };
  const CudaFunctions& functions = cuda(config_.cuda_library);
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

// A device that fails in the thread of a caller has failed in the program, which nobody else can go on without.
void Engine::Impl::end_by_device(const Error& error) {
  with_peers([&](Peers&) { throw error; });
  throw error;
}

// Records how far the stream of a GPU's request has been filled. last: the mark of the previous request of the same
// call, during which the program gives the stream nothing else.
void Engine::Impl::note_stream(Request& request, StreamMark* last) {
  request.delivered = nullptr;
  request.nccl = nullptr;
  if (request.place.kind == DeviceKind::cpu) return;
  if (last && last->event && last->place == request.place) {
    request.ready = last->event;
    return;
  }
  const CudaFunctions& functions = functions_for(request);
  try {
    request.ready = std::make_shared<CudaEvent>(functions, request.place.device);
    request.ready->record(request.place.stream);
    if (last) *last = {request.place, request.ready};
  } catch (const Error& error) {
    end_by_device(error);
  }
}

void Engine::Impl::fill(std::span<const Fill> fills) {
  std::vector<CudaCopy> copies;
  const Request* first = nullptr;  // of these
  const auto queue = [&] {
    if (copies.empty()) return;
    const auto& [kind, device, stream] = first->place;
    const CudaFunctions& functions = functions_for(*first);
    try {
      check_cuda(functions.copy_all(device, stream, copies.data(), copies.size()), "copying tensors", device);
    } catch (const Error& error) {
      end_by_device(error);
    }
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

// The coordinator of another group than the world's asks for it when it first waits.
void Engine::Impl::await_turn(const Group& group) {
  progress_lock_.assert_held();
  if (epoch_.over()) return;
  GroupEngine& world = *group_engines_.at(0);
  if (world.control_plane().cut_off())
    throw Error(Code::shut_down, "process set " + std::to_string(group.id()) + " cannot use NCCL any more: rank " +
                                     std::to_string(world.group().rank(0)) + ", which orders its launches, or a rank " +
                                     "on the way there, has left");
  if (group.index() == 0 && launches_.ask(group.id()))
    world.send_up(LaunchRequest{world_.rank, group.id(), {group.ranks().begin(), group.ranks().end()}});
}

}  // namespace lightcc
