// The backend that runs collectives on memory of GPUs by NCCL. All of a collective is queued on one stream: whatever is
// queued there behind it finds its output. Its Work is done when it is queued, not when the GPU has come to it.
#pragma once
#include <string>

#include "collective/collective.h"
#include "device/cuda_objects.h"
#include "device/nccl.h"

namespace lightcc {

// A communicator that gives itself back. No call of NCCL blocks; what fails throws Error{internal}.
class NcclCommunicator {
 public:
  // The member is in this process; all others make theirs with the same id.
  NcclCommunicator(const CudaFunctions&, const NcclFunctions&, int device, int members, int member,
                   const NcclUniqueId&);
  ~NcclCommunicator();  // waits until what is queued has run, for a bounded time; else aborts
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // None of these after abort().
  // Whether the last call has taken place. Also finds what other members' failures have done to this one.
  bool ready();
  // Calls the body, which queues collectives as one; they are queued when ready() says so.
  template <class Body> void launch(Body body) {
    on_device("starting a collective", [&] {
      int status = nccl_.GroupStart();
      if (status == kNcclSuccess) status = body(nccl_, comm_);
      const int end = nccl_.GroupEnd();
      return status == kNcclSuccess || status == kNcclInProgress ? end : status;
    });
  }
  // What is queued ends without result, and nothing can be queued any more. Waits for that, but not for long: NCCL may
  // itself wait for whatever the GPU does.
  void abort();
  int device() const { return device_; }

 private:
  template <class Call> void on_device(const char* attempted, Call call);
  [[noreturn]] void refuse(const char* attempted, int status);
  bool finish();        // false: it cannot, in good time

  const CudaFunctions& cuda_;
  const NcclFunctions& nccl_;
  const int device_;
  void* comm_ = nullptr;  // nullptr: it has ended
};

class NcclBackend : public Backend {
 public:
  const char* name() const override { return "nccl"; }
  // Nothing until then. All must outlive this.
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
