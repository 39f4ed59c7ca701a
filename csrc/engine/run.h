// One batch on its way: brings its tensors into the form that a backend takes, runs the collectives, hands the
// results back. Tensors that lie side by side in shared memory run in place; others that were fused are
// copied into a buffer and back.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "engine/counters.h"
#include "engine/request.h"
#include "engine/tracing.h"
#include "net/arena.h"

namespace lightcc {

// Memory for fused tensors: one buffer a group, kept and grown.
class FusionBuffer {
 public:
  explicit FusionBuffer(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
  ~FusionBuffer() { arena_->release(data_); }
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;
  std::byte* at_least(size_t bytes);
  void clear() { arena_->release(std::exchange(data_, nullptr)), bytes_ = 0; }
  const Arena& arena() const { return *arena_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

struct Entry {             // a request of the batch and what the coordinator added to it
  RequestPtr request;
  std::vector<std::vector<int64_t>> rows;
  int absent = 0;          // members that have joined and take part without data; the same in the whole batch
  bool phantom = false;    // this rank is one of them, and the request is nobody's (phantom.h)
};

struct Members {           // of the group, as this rank sees it
  std::vector<int> ranks;
  int index;
  int size() const { return int(ranks.size()); }
};

// What a backend computes when a request asks for op and post: an average is a sum with a factor.
void set_average(Collective&, ReduceOp, double post);

class Run {
 public:
  // choose(collective) gives the backend. All arguments outlive the Run.
  using Choose = std::function<Backend&(const Collective&)>;
  Run(std::vector<Entry> entries, const Members&, FusionBuffer&, Counters&, Tracing&, const Choose&);

  bool step();             // like Work::step
  bool done() const { return next_ == jobs_.size(); }
  int waiting_for() const { return work_ ? work_->waiting_for() : 0; }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  struct Piece { const void* in; void* out; size_t bytes; };
  struct Job {             // one collective, and the pieces to copy before and after it
    Collective collective;
    std::vector<Piece> before, after;
  };
  void plan_allreduce();
  void plan_tensor(Entry&, size_t tensor);
  void* result(Request&, size_t tensor, Shape shape);
  bool copy_some(const std::vector<Piece>&);
  bool start_next();

  std::vector<Entry> entries_;
  const Members& members_;
  FusionBuffer& buffer_;
  Counters& counters_;
  Tracing& tracing_;
  const Choose& choose_;
  std::vector<Job> jobs_;
  size_t next_ = 0;        // job
  size_t piece_ = 0, offset_ = 0;  // in the copies of the job
  std::unique_ptr<Work> work_;
};

}  // namespace lightcc
