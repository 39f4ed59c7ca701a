// The C API for requests: submitting, waiting, taking results.
#include <algorithm>

#include "api/global_state.h"
#include "api/lightcc.h"
#include "engine/validate.h"

namespace lightcc {
namespace {

RequestPtr request_of(int64_t handle) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  auto it = s.handles.find(handle);
  if (it == s.handles.end()) throw Error(Code::invalid_argument, "unknown handle " + std::to_string(handle));
  return it->second;
}

struct Arguments {
  int kind;
  const char* name;
  int group, count;
  const void* const* inputs;
  void* const* outputs;
  const int32_t *dtypes, *ndims;
  const int64_t* shapes;
  int op, root;
  double pre, post;
  const int32_t* splits;
  Callbacks callbacks = {};
};

RequestPtr make_request(Engine& engine, const Arguments& a) {
  if (a.kind < 0 || a.kind > LIGHTCC_BARRIER) refuse("unknown kind of collective " + std::to_string(a.kind));
  if (a.op < 0 || a.op > LIGHTCC_PRODUCT) refuse("unknown reduce op " + std::to_string(a.op));
  auto request = std::make_shared<Request>();
  Announcement& what = request->what;
  what.kind = Kind(a.kind), what.op = ReduceOp(a.op), what.root = a.root, what.pre = a.pre, what.post = a.post;
  request->group = a.group;
  if (a.name)
    request->key = key_of(what.kind, a.name);
  else
    request->automatic = true;
  request->callbacks = a.callbacks;
  if (what.kind == Kind::barrier ? a.count != 0 : a.count < 1)
    refuse(request->title() + ": " + std::to_string(a.count) + " tensors");
  if (a.count && (!a.dtypes || !a.ndims)) refuse(request->title() + ": no dtypes or numbers of dimensions");
  const int64_t* shape = a.shapes;
  for (int i = 0; i < a.count; ++i) {
    if (a.dtypes[i] < 0 || a.dtypes[i] >= kDTypes)
      refuse(request->title() + ": unknown dtype " + std::to_string(a.dtypes[i]));
    if (a.ndims[i] < 0 || (a.ndims[i] > 0 && !shape))
      refuse(request->title() + ": no shape of " + std::to_string(a.ndims[i]) + " dimensions");
    what.tensors.push_back({DType(a.dtypes[i]), Shape(shape, shape + a.ndims[i])});
    shape += a.ndims[i];
    if (const Shape& own = what.tensors.back().shape; !is_countable(own))
      refuse(request->title() + ": a tensor of shape " + text_of(own) +
             " cannot be sent: at most 64 dimensions, 0 or more each, that multiply to at most 2^43");
    bool writes = what.kind == Kind::allreduce || what.kind == Kind::broadcast;
    request->inputs.push_back(a.inputs ? a.inputs[i] : nullptr);
    request->outputs.push_back(a.outputs ? a.outputs[i] : nullptr);
    if (count_of(what.tensors.back().shape) > 0 && writes && !request->outputs.back())
      refuse(request->title() + " needs output memory");
  }
  if (what.kind == Kind::alltoall && a.splits) {
    const auto group = engine.group(a.group);
    const size_t n = group ? size_t(group->size()) * size_t(a.count) : 0;
    what.splits.assign(a.splits, a.splits + n);
  }
  return request;
}

int64_t keep(const RequestPtr& request) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  s.handles.emplace(s.next_handle, request);
  return s.next_handle++;
}

// May the call take the fast path? Whatever is wrong with it is said by make_request().
bool is_plain(const Arguments& a) {
  bool plain = a.kind == LIGHTCC_ALLREDUCE && a.count == 1 && a.op >= 0 && a.op <= LIGHTCC_PRODUCT &&
               a.op != LIGHTCC_ADASUM && a.inputs && a.outputs && a.inputs[0] && a.outputs[0] && a.dtypes && a.ndims &&
               a.dtypes[0] >= 0 && a.dtypes[0] < kDTypes;
  if (!plain || a.ndims[0] < 0 || (a.ndims[0] && !a.shapes)) return false;
  const std::span shape(a.shapes, size_t(a.ndims[0]));
  return is_countable(shape) && std::find(shape.begin(), shape.end(), 0) == shape.end();
}

// A prepared request whose last start is over and released, to be started again as it is.
RequestPtr renewed(const RequestPtr& request) {
  std::atomic_thread_fence(std::memory_order_acquire);  // whoever gave up the last other reference is done with it
  request->results.clear(), request->text.clear();
  request->code = Code::pending, request->asked_ns = 0, request->name_held = false;
  request->finished.store(false, std::memory_order_relaxed);
  return request;
}
RequestPtr copy_of(const Request& form) {
  auto request = std::make_shared<Request>();
  request->group = form.group, request->key = form.key, request->what = form.what;
  request->inputs = form.inputs, request->outputs = form.outputs;
  return request;
}

int64_t launch(Engine& engine, const RequestPtr& request, int flags, bool begun = false) {
  bool block = flags & LIGHTCC_BLOCK;
  if (!begun) engine.submit(request, block);
  if (request->callbacks.done) {
    if (block) engine.wait(*request, now_ns() + 100'000'000);
    return 0;
  }
  if (block && engine.wait(*request, now_ns() + 100'000'000)) {
    if (request->code != Code::ok) throw Error(request->code, request->text);
    bool outputs_left =
        std::any_of(request->results.begin(), request->results.end(), [](auto& r) { return bool(r.own); });
    if (!outputs_left) return 0;
  }
  return keep(request);
}

// By the fast path if the caller waits and the call is plain, else by negotiation.
int64_t run(const Arguments& a, int flags) {
  auto e = engine();
  RequestPtr begun;
  if (flags & LIGHTCC_BLOCK && is_plain(a) &&
      e->try_fast_path({a.group, a.name, a.inputs[0], a.outputs[0], DType(a.dtypes[0]), {a.shapes, size_t(a.ndims[0])},
                        ReduceOp(a.op), a.pre, a.post, a.callbacks}, &begun)) {
    if (a.callbacks.done) a.callbacks.done(a.callbacks.context, LIGHTCC_OK, "");
    return 0;
  }
  return launch(*e, begun ? begun : make_request(*e, a), flags, begun != nullptr);
}

uint64_t ns_of(int timeout_ms) { return uint64_t(std::max(timeout_ms, 0)) * 1'000'000; }

// Its handle was waited for, seen as done or released.
void give_back(Request& request) {
  GlobalState& s = global_state();
  std::unique_lock lock(s.mutex);
  if (std::shared_ptr<Engine> engine = s.engine) lock.unlock(), engine->give_back(request);
}

int status_of(Request& request) {
  if (!request.finished.load(std::memory_order_acquire)) return LIGHTCC_PENDING;
  if (request.name_held.load(std::memory_order_relaxed)) give_back(request);
  if (request.code != Code::ok) set_last_error(request.text);
  return int(request.code);
}

}  // namespace
}  // namespace lightcc

using namespace lightcc;

extern "C" {

int64_t lightcc_submit(int kind, const char* name, int group, const void* input, void* output, int dtype, int ndim,
                       const int64_t* shape, int op, int root, double prescale, double postscale, const int32_t* splits,
                       int flags) {
  return guard(
      [&]() -> int64_t {
        int tensors = kind == LIGHTCC_BARRIER ? 0 : 1;
        return run({kind, name, group, tensors, &input, &output, &dtype, &ndim, shape, op, root, prescale, postscale,
                    splits}, flags);
      },
      -1);
}

int64_t lightcc_submit_group(int kind, const char* name, int group, int count, const void* const* inputs,
                             void* const* outputs, const int32_t* dtypes, const int32_t* ndims, const int64_t* shapes,
                             int op, int root, double prescale, double postscale, const int32_t* splits, int flags,
                             const lightcc_callbacks* callbacks) {
  return guard(
      [&]() -> int64_t {
        Arguments arguments{kind, name, group, count, inputs, outputs, dtypes, ndims, shapes, op, root, prescale,
                            postscale, splits};
        if (callbacks)
          arguments.callbacks = {callbacks->done, callbacks->allocate, callbacks->context, callbacks->received};
        return run(arguments, flags);
      },
      -1);
}

int64_t lightcc_prepare(int kind, const char* name, int group, const void* input, void* output, int dtype, int ndim,
                        const int64_t* shape, int op, int root, double prescale, double postscale,
                        const int32_t* splits, int) {
  return guard(
      [&]() -> int64_t {
        if (!name) refuse("a prepared request needs a name");
        auto e = engine();
        auto request = make_request(
            *e, {kind, name, group, 1, &input, &output, &dtype, &ndim, shape, op, root, prescale, postscale, splits});
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
          auto it = s.prepared.find(prepared);
          if (it == s.prepared.end())
            refuse("unknown prepared request " + std::to_string(prepared) + ": prepare it again after init()");
          request = it->second.use_count() == 1 ? renewed(it->second) : copy_of(*it->second);
        }
        return launch(*e, request, 0);
      },
      -1);
}

int64_t lightcc_join(void) {
  return guard(
      [&]() -> int64_t {
        auto e = engine();
        auto request = std::make_shared<Request>();
        request->what.kind = Kind::join;
        request->key = std::string(name_of(Kind::join)) + ".";
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
    for (int i = 0; i < count; ++i) requests.push_back(request_of(handles[i]));
    uint64_t deadline = now_ns() + ns_of(timeout_ms);
    // The last first: when it is done, the others mostly are, and each wait that ends rings the engine thread.
    for (auto it = requests.rbegin(); it != requests.rend(); ++it)
      if (!(*it)->finished.load(std::memory_order_acquire) && !engine()->wait(**it, deadline))
        return int(LIGHTCC_PENDING);
    for (int i = 0; i < count; ++i) lightcc_release(handles[i]);
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
        return int(done);
      },
      -1);
}

int lightcc_release(int64_t handle) {
  RequestPtr request;
  {
    GlobalState& s = global_state();
    std::lock_guard lock(s.mutex);
    auto it = s.handles.find(handle);
    if (it == s.handles.end()) return LIGHTCC_INVALID_ARGUMENT;
    request = std::move(it->second);
    s.handles.erase(it);
  }
  if (request->name_held.load() || !request->finished.load(std::memory_order_acquire)) give_back(*request);
  return LIGHTCC_OK;
}

int lightcc_output(int64_t handle, int index, void** data, int64_t* shape, int* ndim) {
  return guard([&] {
    auto request = request_of(handle);
    if (!request->finished.load(std::memory_order_acquire)) refuse(request->title() + " is not finished");
    if (index < 0 || size_t(index) >= request->results.size())
      refuse(request->title() + " has no output " + std::to_string(index));
    Output& output = request->results[index];
    if (!output.own)
      refuse(request->title() + ": output " + std::to_string(index) + " is not lightcc's to give, or given already");
    if (*ndim < int(output.shape.size()))
      refuse("room for " + std::to_string(*ndim) + " dimensions, need " + std::to_string(output.shape.size()));
    std::copy(output.shape.begin(), output.shape.end(), shape);
    *ndim = int(output.shape.size());
    *data = output.own.get();
    if (auto pool = output.own.get_deleter().pool) keep_owner(*data, [pool, at = *data] { pool->give_back(at); });
    output.own.release();
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
