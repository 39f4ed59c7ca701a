// What NCCL calls a communicator of a net plugin: one direction of a connection, and its requests.
//
// Receives may be grouped (HARP_MAX_RECVS): NCCL posts several buffers at once, each with a tag, and a send belongs to
// the first free buffer of its tag in the oldest group. HARP's messages match in order, so the receiver tells the tags
// of each group in a message the other way, and the sender sends a group when all its messages are there, in the order
// of the buffers.
//
// Threads: one calls send, receive and test; another may register, deregister and, when these are over, close.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <memory>

#include "harp_plugin/nccl/devices.h"
#include "nccl_abi/nccl_net.h"

namespace harp {

class Communicator;

// The tags of grouped receives, as they are sent.
struct Group {
  int32_t count = 0;
  std::array<int32_t, nccl::kMostReceives> tags{};
};

struct NetRequest {
  // Another thread looks whether memory that is deregistered is still in use.
  struct Part {
    std::atomic<const uint8_t*> data{nullptr};  // nullptr: this part is over
    std::atomic<size_t> bytes{0};
    harp_request* handle = nullptr;
    bool ended = false;
    size_t moved = 0;
  };
  Communicator* owner = nullptr;
  bool used = false;
  int count = 0;
  std::array<Part, nccl::kMostReceives> parts;
  nccl::Result result = nccl::kSuccess;  // of the first part that failed
  Group group;                           // of a grouped receive
  harp_request* telling = nullptr;       // the message with the group
};

struct Memory {  // what NCCL has registered
  const uint8_t* data;
  size_t bytes;
};

class Communicator {
 public:
  Communicator(SharedContext, harp_connection*, bool grouped);
  ~Communicator();  // afterwards no memory is touched

  // A request that is nullptr would block.
  nccl::Result send(const void* data, size_t bytes, int tag, NetRequest**);
  nccl::Result receive(int count, void** data, const size_t* capacities, const int* tags, NetRequest**);
  // Whether it is over, and then so is the request. The sizes (or nullptr) are those of its parts.
  nccl::Result test(NetRequest&, bool* done, int* sizes);
  void deregister(const Memory&);  // ends the connection if a request still uses it

 private:
  struct Announced {  // a group that the receiver waits for, and what is there of it
    Group group;
    std::array<NetRequest*, nccl::kMostReceives> sends{};
    size_t filled = 0;
  };
  struct NextGroup {  // where the next group comes to
    Group group;
    harp_request* handle = nullptr;
  };
  NetRequest* take(int count);
  void give_back(NetRequest&);
  int progress(NetRequest::Part&);
  nccl::Result hear_of_groups();
  bool join(NetRequest&, int tag);
  nccl::Result failed(int status);

  const SharedContext context_;
  harp_connection* const connection_;
  const bool grouped_;
  bool warned_ = false;
  std::array<NetRequest, nccl::kMostRequests> requests_;
  // A sender's, if receives are grouped.
  std::array<NextGroup, nccl::kMostRequests> expected_;
  size_t next_expected_ = 0;
  std::deque<Announced> announced_;
};

nccl::Result result_of(int status);  // of a function of harp.h

}  // namespace harp
