// The backend that runs collectives on memory of GPUs by NCCL. All of a collective is queued on one stream: whatever is
// queued there behind it finds its output. Its Work is done when it is queued, not when the GPU has come to it.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "device/cuda_objects.h"
#include "device/nccl.h"

namespace lightcc {

// A communicator that gives itself back. No call of NCCL blocks; what fails throws Error{internal}.
class NcclCommunicator {
 public:
  // The member is in this process; all others make theirs with the same id. ready() says when all have.
  NcclCommunicator(const CudaFunctions&, const NcclFunctions&, int device, int members, int member,
                   const NcclUniqueId&);
  ~NcclCommunicator();  // aborts, unless it has ended; does not wait for long
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // None of these after finish() or abort().
  // Whether the last call has taken place. Also finds what other members' failures have done to this one.
  bool ready();
  // Calls the body, which queues collectives as one; they are queued when ready() says so.
  void launch(const std::function<int(const NcclFunctions&, void* comm)>& body);
  // Ends it in peace, once what is queued has run and the other members do the same. false: not by the deadline. NCCL
  // may wait longer for other ranks of this host.
  bool finish(uint64_t deadline_ns);
  // What is queued ends without result, and nothing can be queued any more. NCCL may wait for whatever the GPU does
  // before the future is there.
  std::future<void> abort();
  int device() const { return device_; }
  int members() const { return members_; }
  int member() const { return member_; }

 private:
  void on_device(const char* attempted, const std::function<int()>& call);
  [[noreturn]] void refuse(const char* attempted, int status);

  const CudaFunctions& cuda_;
  const NcclFunctions& nccl_;
  const int device_, members_, member_;
  void* comm_ = nullptr;  // nullptr: it has ended
};

// A member's communicators, which end together: among all members, one for each stream; and two for 2D, which may be
// missing: among the members of its node, and among those that have its place on each node.
struct NcclCommunicators {
  std::vector<std::unique_ptr<NcclCommunicator>> all;
  std::unique_ptr<NcclCommunicator> local, cross;

  ~NcclCommunicators();  // aborts; does not wait for long
  void check();          // throws Error{internal} if one has failed
  // None is here afterwards: a thread of its own finishes all, or aborts them at the deadline (0: at once). NCCL can
  // have one call in progress a thread, and some of these wait.
  std::future<void> end(uint64_t deadline_ns);
};

// What can run a reduction by NCCL's kernels.
bool nccl_reduces(const Collective&);
// Queues to[i] = factor * from[i], unless the factor is 1. Returns where the result lies.
const void* nccl_scale(const CudaFunctions&, int device, void* stream, DType, double factor, void* to,
                       const void* from, size_t count);

class NcclBackend : public Backend {
 public:
  const char* name() const override { return "nccl"; }
  // Accepts nothing until then. All must outlive this. May be called again, for another stream and its communicator.
  void connect(const CudaFunctions& cuda, NcclCommunicator& communicator, void* stream) {
    cuda_ = &cuda, communicator_ = &communicator, stream_ = stream;
  }
  bool accepts(const Collective&) const override;
  // The one before it must be done.
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

 private:
  class Launch;

  const CudaFunctions* cuda_ = nullptr;
  NcclCommunicator* communicator_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace lightcc
