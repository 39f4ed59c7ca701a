// One call of a framework: one tensor, or several that are one unit.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>

#include "engine/negotiate/control/member_plans.h"
#include "engine/negotiate/control/message.h"
#include "engine/request/call.h"
#include "engine/request/compressor.h"
#include "engine/request/output_pool.h"

namespace lightcc {

struct OutputDeleter {
  std::shared_ptr<OutputPool> pool;  // nullptr: malloc
  void operator()(void* p) const { pool ? pool->give_back(p) : std::free(p); }
};

class CudaEvent;
class NcclStream;

// Where an output of a GPU's request lies until the caller takes it.
struct GpuOutput {
  virtual ~GpuOutput() = default;
  // From there to a tensor, on the tensor's own stream. Any thread.
  virtual void copy_to(const DevicePlace&, void* tensor, const void* from, size_t bytes) = 0;
};

struct Output {                    // of a kind whose shape is known only when all ranks have spoken
  std::unique_ptr<void, OutputDeleter> own;  // unless the caller allocates
  std::shared_ptr<GpuOutput> gpu;            // of a GPU's request
  void* data = nullptr;
  Shape shape;
  std::vector<int32_t> rows_from;  // alltoall: by member
};

inline bool changes_groups(Kind kind) { return kind == Kind::add_group || kind == Kind::remove_group; }

inline std::string key_of(Kind kind, const std::string& name) { return std::string(name_of(kind)) + "." + name; }
inline std::string automatic_name(uint64_t number) { return std::string(kAutomatic) + std::to_string(number); }
inline uint64_t automatic_number(const std::string& name) { return std::stoull(name.substr(kAutomatic.size())); }

// What users read of a request: "allreduce of tensor 'w'", "barrier()". key: empty if it has no name yet.
inline std::string title_of(Kind kind, const std::string& key) {
  const bool tensors = kind != Kind::join && kind != Kind::barrier && !changes_groups(kind);
  const std::string name = key.substr(key.find('.') + 1), text = name_of(kind);
  if (!tensors) return name.empty() || is_automatic(key) ? text + "()" : text + " '" + name + "'";
  return text + (key.empty() ? " of an unnamed tensor" : " of tensor '" + name + "'");
}

inline std::string title_of_key(const std::string& key) {  // "allreduce.w"
  for (int kind = 0; kind < kKinds; ++kind)
    if (key.starts_with(std::string(name_of(Kind(kind))) + ".")) return title_of(Kind(kind), key);
  return key;
}

// What is asked, and the one way to say it. Constant once it is submitted, but for an automatic name, which is drawn
// then, and for the codec, which a compressor chooses then.
struct RequestForm {
  RequestForm() = default;
  // name: nullptr for an automatic one.
  RequestForm(Kind kind, const char* name, int in_group = 0) : group(in_group), automatic(!name) {
    what.kind = kind;
    if (name) key = key_of(kind, name);
  }
  void add_tensor(TensorSpec tensor, const void* input, void* output) {
    what.tensors.push_back(std::move(tensor));
    inputs.push_back(input);
    outputs.push_back(output);
  }
  std::string title() const {
    return is_point_to_point(what.kind) ? peer_title() : title_of(what.kind, key);
  }
  std::string name() const { return std::string(name_view()); }
  std::string_view name_view() const { return std::string_view(key).substr(key.find('.') + 1); }

  int group = 0;
  int set = 0;                     // of requests that are submitted together in each step (plan.h); 0: none
  int32_t tag = 0;                 // send, receive: by which they find each other; the peer is what.root, a member
  int32_t space = 0;               // of its own tags
  std::string key;                 // "<kind>.<name>": how the ranks know it
  bool automatic = false;          // the name is kAutomatic and a number
  Announcement what;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;      // nullptr: see Output
  DevicePlace place;               // of all of these
  bool padded = false;             // behind each, up to the next multiple of kLine bytes, there is nothing
  bool unordered = false;          // LIGHTCC_UNORDERED: its stream goes on behind its outputs only if it fails
  Callbacks callbacks;
  std::shared_ptr<Compressor> compressor;  // what.codec comes from it; nullptr: none
  Residuals residuals;             // of its tensors

 private:
  std::string peer_title() const {  // "send to rank 1 (tag 5)"
    const bool named = !key.empty() && !is_automatic(key);
    return std::string(name_of(what.kind)) + (named ? " of tensor '" + name() + "'" : "") +
           (what.kind == Kind::send ? " to rank " : " from rank ") + std::to_string(what.root) +
           (group == 0 ? "" : " of process set " + std::to_string(group)) + " (tag " + std::to_string(tag) + ")";
  }
};

// What becomes of it, from its submission on: the engine's, until it has finished; then the caller's.
struct Flight {
  uint64_t submitted_ns = 0;
  std::shared_ptr<CudaEvent> ready;  // what its stream had at submission; unless it is the CPU's
  std::vector<Output> results;
  bool encodes = false;            // its GPU has kernels for its codec, and may use them (gpu_streams.h)
  NcclStream* nccl = nullptr;      // where it runs on its GPU; nullptr: it is copied to the host
  std::shared_ptr<CudaEvent> delivered;  // the outputs of a GPU's request are there; nullptr: nothing was queued
  int changed_group = -1;          // add_group, remove_group: which, once this rank has added or removed it
  int last_joined = -1;            // join: the world rank that joined last
  Code code = Code::pending;
  std::string text;
  uint64_t warned_ns = 0, asked_ns = 0;  // stall inspection
  std::atomic<bool> finished{false};     // released after code, text and results
  std::atomic<bool> unheard{false};      // its handle was released before it has finished: nobody hears of its end
  std::atomic<bool> planned{false};      // it came to a fusion plan, which may hold it ...
  std::atomic<bool> awaited{false};      // ... but not while a caller waits for it
  std::atomic<bool> name_held{false};    // it is done, and yet nobody else may have its name (names.h)

  void renew() {                   // to be submitted again
    results.clear();
    text.clear();
    code = Code::pending;
    asked_ns = 0;
    unheard = name_held = planned = awaited = false;
    finished.store(false, std::memory_order_relaxed);
  }
};

struct Request : RequestForm, Flight {
  Request() = default;
  explicit Request(RequestForm form) : RequestForm(std::move(form)) {}
  void submitted(uint64_t now_ns) { submitted_ns = warned_ns = now_ns; }

  // What the last submission has found out, for a request that is submitted again as it is.
  std::string flight_name;         // inbox.h
  MemberPlans::Slot slot;
};

}  // namespace lightcc
