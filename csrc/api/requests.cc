// The C API for requests: submitting, waiting, taking results.
#include <algorithm>

#include "api/global_state.h"
#include "api/lightcc.h"
#include "api/read_request.h"
#include "device/cuda_objects.h"
#include "engine/request/gpu_streams.h"
#include "engine/request/output_pool.h"
#include "net/bootstrap/world.h"
#include "net/group.h"

namespace lightcc {
namespace {

RequestPtr request_of(GlobalState& s, int64_t handle) {  // which is locked
  auto it = s.handles.find(handle);
  if (it == s.handles.end()) throw Error(Code::invalid_argument, "unknown handle " + std::to_string(handle));
  return it->second;
}

RequestPtr request_of(int64_t handle) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  return request_of(s, handle);
}

int64_t keep(const RequestPtr& request) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  s.handles.emplace(s.next_handle, request);
  return s.next_handle++;
}

// The state is locked, as for the next.
const RequestPtr& prepared_request(GlobalState& s, int64_t prepared) {
  auto it = s.prepared.find(prepared);
  if (it == s.prepared.end())
    refuse("unknown prepared request " + std::to_string(prepared) + ": prepare it again after init()");
  return it->second;
}

// The request of a start: the prepared one itself, once its last start is over and released.
RequestPtr started(GlobalState& s, int64_t prepared) {
  const RequestPtr& request = prepared_request(s, prepared);
  if (request.use_count() > 1) return std::make_shared<Request>(static_cast<const RequestForm&>(*request));
  std::atomic_thread_fence(std::memory_order_acquire);  // whoever gave up the last other reference is done with it
  request->renew();
  return request;
}

RequestPtr request_from(const Engine& engine, const lightcc_request& from) {
  int members = 0;
  if (from.kind == LIGHTCC_ALLTOALL && from.splits)
    if (const auto group = engine.group(from.group)) members = group->size();
  RequestForm form = form_of(from, members);
  if (from.codec != 0) {
    form.compressor = compressor(from.codec);
    if (from.name) form.residuals = form.compressor->residuals(from.group, from.name, form.what.tensors.size());
    form.what.codec = form.compressor->codec_for(form.residuals);
  }
  return std::make_shared<Request>(std::move(form));
}

constexpr uint64_t kBlockNs = 100'000'000;  // how long LIGHTCC_BLOCK may keep the caller

// Whether a request that is done has outputs that the caller takes by its handle.
bool has_outputs_left(const Request& request) {
  const Kind kind = request.what.kind;
  if (request.place.kind != DeviceKind::cpu)
    return kind == Kind::allgather || kind == Kind::alltoall || kind == Kind::reducescatter;
  return std::any_of(request.results.begin(), request.results.end(), [](auto& result) { return bool(result.own); });
}

// The program is told that it is done, or gives up its handle: what its stream is given from now on runs after its
// outputs.
void heard_of(const Request& request) {
  if (!request.unordered) order_own_stream(request);
}

int64_t launch(Engine& engine, const RequestPtr& request, bool block, bool begun = false) {
  if (!begun) engine.submit(request, block);
  if (request->callbacks.done) {
    if (block) engine.wait(*request, now_ns() + kBlockNs);
    return 0;
  }
  if (block && engine.wait(*request, now_ns() + kBlockNs)) {
    if (request->code != Code::ok) throw Error(request->code, request->text);
    heard_of(*request);
    if (has_outputs_left(*request)) return keep(request);
    return 0;
  }
  return keep(request);
}

// True: done. False: *begun is on its way; or, if that is nullptr, nothing has happened.
bool try_fast_path(Engine& engine, const lightcc_request& from, RequestPtr* begun) {
  FastPathFacts facts = facts_of(from);
  if (!may_take_fast_path(facts)) return false;
  const lightcc_tensor tensor = read_tensor(from, 0);
  add_facts_of(tensor, &facts);
  return may_take_fast_path(facts) &&
         engine.try_fast_path({from.group, from.name, tensor.input, tensor.output, DType(tensor.dtype),
                               {tensor.shape, size_t(tensor.ndim)}, ReduceOp(from.op), from.prescale, from.postscale,
                               {from.done, from.allocate, from.context, from.received}}, facts, begun);
}

uint64_t ns_of(int timeout_ms) { return uint64_t(std::max(timeout_ms, 0)) * 1'000'000; }

// Its handle was waited for, seen as done or released.
void give_back(Request& request) {
  GlobalState& s = global_state();
  std::unique_lock lock(s.mutex);
  if (std::shared_ptr<Engine> engine = s.engine) {
    lock.unlock();
    engine->give_back(request);
  }
}

int status_of(Request& request) {
  if (!request.finished.load(std::memory_order_acquire)) return LIGHTCC_PENDING;
  if (request.name_held.load(std::memory_order_relaxed)) give_back(request);
  heard_of(request);
  if (request.code != Code::ok) set_last_error(request.text);
  return int(request.code);
}

Output& output_of(Request& request, int index) {
  if (!request.finished.load(std::memory_order_acquire)) refuse(request.title() + " is not finished");
  if (index < 0 || size_t(index) >= request.results.size())
    refuse(request.title() + " has no output " + std::to_string(index));
  return request.results[size_t(index)];
}

void tell_shape(const Output& output, int64_t* shape, int* ndim) {
  if (*ndim < int(output.shape.size()))
    refuse("room for " + std::to_string(*ndim) + " dimensions, need " + std::to_string(output.shape.size()));
  std::copy(output.shape.begin(), output.shape.end(), shape);
  *ndim = int(output.shape.size());
}

DevicePlace cuda_place(const lightcc_place* place) {
  if (!place || place->kind != LIGHTCC_CUDA) refuse("lightcc_place is not one of a GPU");
  return place_of(*place);
}

}  // namespace
}  // namespace lightcc

using namespace lightcc;

extern "C" {

int64_t lightcc_submit(const lightcc_request* caller) {
  return guard(
      [&]() -> int64_t {
        auto e = engine();
        const lightcc_request from = read_request(caller);
        RequestPtr begun;
        if (try_fast_path(*e, from, &begun)) {
          if (from.done) from.done(from.context, LIGHTCC_OK, "");
          return 0;
        }
        return launch(*e, begun ? begun : request_from(*e, from), from.flags & LIGHTCC_BLOCK, begun != nullptr);
      },
      -1);
}

int64_t lightcc_prepare(const lightcc_request* caller) {
  return guard(
      [&]() -> int64_t {
        auto e = engine();
        const lightcc_request from = read_request(caller);
        if (!from.name) refuse("a prepared request needs a name");
        if (from.done || from.allocate || from.received) refuse("a prepared request has no callbacks");
        auto request = request_from(*e, from);
        GlobalState& s = global_state();
        std::lock_guard lock(s.mutex);
        s.prepared.emplace(s.next_handle, request);
        return s.next_handle++;
      },
      -1);
}

int64_t lightcc_start(int64_t prepared) {
  return guard(
      [&]() -> int64_t {
        auto e = engine();
        RequestPtr request;
        {
          GlobalState& s = global_state();
          std::lock_guard lock(s.mutex);
          request = started(s, prepared);
        }
        return launch(*e, request, false);
      },
      -1);
}

int lightcc_start_all(const int64_t* prepared, int count, int64_t* handles) {
  return guard([&] {
    std::fill_n(handles, count, 0);
    auto e = engine();
    std::vector<RequestPtr> requests;
    requests.reserve(size_t(count));
    size_t begun = 0;
    const auto keep_begun = [&] {
      GlobalState& s = global_state();
      std::lock_guard lock(s.mutex);
      for (size_t i = 0; i < begun; ++i) s.handles.emplace(handles[i] = s.next_handle++, std::move(requests[i]));
    };
    {
      GlobalState& s = global_state();
      std::lock_guard lock(s.mutex);
      for (int i = 0; i < count; ++i) requests.push_back(started(s, prepared[i]));
    }
    try {
      e->submit_all(requests, &begun);
    } catch (...) {
      keep_begun();
      throw;
    }
    keep_begun();
    return 0;
  });
}

int lightcc_fill_all(const int64_t* prepared, const void* const* sources, int count) {
  return guard([&] {
    auto e = engine();
    std::vector<Fill> fills;
    fills.reserve(size_t(count));
    {
      GlobalState& s = global_state();
      std::lock_guard lock(s.mutex);
      for (int i = 0; i < count; ++i)
        if (const auto& request = prepared_request(s, prepared[i]); sources[i]) fills.push_back({request, sources[i]});
    }
    e->fill(fills);
    return 0;
  });
}

int64_t lightcc_join(void) {
  return guard(
      [&]() -> int64_t {
        auto e = engine();
        auto request = std::make_shared<Request>(RequestForm(Kind::join, ""));
        e->submit(request, false);
        return keep(request);
      },
      -1);
}

int lightcc_last_joined(int64_t handle) {
  return guard(
      [&] {
        auto request = request_of(handle);
        if (!request->finished.load(std::memory_order_acquire) || request->last_joined < 0)
          refuse(request->title() + " is not a join() that all ranks have joined");
        return request->last_joined;
      },
      -1);
}

int lightcc_discard(int64_t prepared) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  return s.prepared.erase(prepared) ? LIGHTCC_OK : LIGHTCC_INVALID_ARGUMENT;
}

int lightcc_wait(int64_t handle, int timeout_ms) {
  return guard([&] {
    auto request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire))
      engine()->wait(*request, now_ns() + ns_of(timeout_ms));
    return status_of(*request);
  });
}

int lightcc_finish(int64_t handle, int timeout_ms) {
  int status = lightcc_wait(handle, timeout_ms);
  if (status != LIGHTCC_PENDING) lightcc_release(handle);
  return status;
}

int lightcc_finish_all(const int64_t* handles, int count, int timeout_ms) {
  return guard([&] {
    std::vector<RequestPtr> requests;
    requests.reserve(size_t(count));
    GlobalState& s = global_state();
    {
      std::lock_guard lock(s.mutex);
      for (int i = 0; i < count; ++i) requests.push_back(request_of(s, handles[i]));
    }
    uint64_t deadline = now_ns() + ns_of(timeout_ms);
    // The last first: when it is done, the others mostly are, and each wait that ends rings the engine thread.
    for (auto it = requests.rbegin(); it != requests.rend(); ++it)
      if (!(*it)->finished.load(std::memory_order_acquire) && !engine()->wait(**it, deadline))
        return int(LIGHTCC_PENDING);
    {
      std::lock_guard lock(s.mutex);
      for (int i = 0; i < count; ++i) s.handles.erase(handles[i]);
    }
    for (const RequestPtr& request : requests) {
      if (request->name_held.load(std::memory_order_relaxed)) give_back(*request);
      heard_of(*request);
    }
    auto failed = [](const RequestPtr& request) { return request->code != Code::ok; };
    auto first = std::find_if(requests.begin(), requests.end(), failed);
    return first == requests.end() ? int(LIGHTCC_OK) : status_of(**first);
  });
}

int lightcc_poll(int64_t handle) {
  return guard(
      [&] {
        auto request = request_of(handle);
        const bool done = request->finished.load(std::memory_order_acquire) || engine()->poll(*request);
        if (done && request->name_held.load(std::memory_order_relaxed)) give_back(*request);
        if (done) heard_of(*request);
        return int(done);
      },
      -1);
}

int lightcc_release(int64_t handle) {
  return guard([&] {
    RequestPtr request;
    {
      GlobalState& s = global_state();
      std::lock_guard lock(s.mutex);
      auto it = s.handles.find(handle);
      if (it == s.handles.end()) return int(LIGHTCC_INVALID_ARGUMENT);
      request = std::move(it->second);
      s.handles.erase(it);
    }
    request->unheard = true;
    const bool finished = request->finished;
    if (request->name_held.load() || !finished) give_back(*request);
    if (finished) heard_of(*request);
    return int(LIGHTCC_OK);
  });
}

int lightcc_output(int64_t handle, int index, void** data, int64_t* shape, int* ndim) {
  return guard([&] {
    auto request = request_of(handle);
    Output& output = output_of(*request, index);
    if (!output.own)
      refuse(request->title() + ": output " + std::to_string(index) + " is not lightcc's to give, or given already");
    tell_shape(output, shape, ndim);
    *data = output.own.get();
    if (auto pool = output.own.get_deleter().pool) keep_owner(*data, [pool, at = *data] { pool->give_back(at); });
    output.own.release();
    return 0;
  });
}

int lightcc_output_shape(int64_t handle, int index, int64_t* shape, int* ndim) {
  return guard([&] {
    tell_shape(output_of(*request_of(handle), index), shape, ndim);
    return 0;
  });
}

int lightcc_output_to(int64_t handle, int index, const lightcc_place* place, void* data) {
  return guard([&] {
    const RequestPtr request = request_of(handle);
    Output& output = output_of(*request, index);
    const int64_t bytes = count_of(output.shape) * int64_t(size_of(request->what.tensors[size_t(index)].dtype));
    if (bytes == 0) return 0;
    if (!output.gpu)
      refuse(request->title() + ": output " + std::to_string(index) + " is not in memory for a GPU, or was taken");
    output.gpu->copy_to(cuda_place(place), data, output.data, size_t(bytes));
    output.gpu = nullptr;
    return 0;
  });
}

int lightcc_order(int64_t handle, const lightcc_place* place) {
  return guard([&] {
    const RequestPtr request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire)) refuse(request->title() + " is not finished");
    const DevicePlace to = cuda_place(place);
    if (request->delivered) request->delivered->order(to.device, to.stream);
    return 0;
  });
}

int lightcc_received_splits(int64_t handle, int index, int32_t* splits) {
  return guard([&] {
    auto request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire) || index < 0 || size_t(index) >= request->results.size())
      refuse(request->title() + " has no received splits");
    auto& from = request->results[index].rows_from;
    std::copy(from.begin(), from.end(), splits);
    return 0;
  });
}

}  // extern "C"
