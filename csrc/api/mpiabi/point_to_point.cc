// Messages between two ranks. In JAX they are ppermute, where a rank receives from one and sends to some, and
// all_to_all, where in each round all send to one and receive from another.
#include <cstdint>
#include <string>
#include <utility>

#include "api/lightcc.h"
#include "api/mpiabi/abi.h"
#include "api/mpiabi/calls.h"
#include "api/mpiabi/communicator.h"
#include "api/mpiabi/datatypes.h"
#include "api/mpiabi/process.h"
#include "base/error.h"

const MPIABI_Request MPIABI_REQUEST_NULL = 0;

namespace lightcc::mpiabi {
namespace {

constexpr uint32_t kTags = 1 << 12;  // of a communicator; JAX uses one

struct MessageCall {
  int kind;
  const void* from;
  void* to;
  int count;
  MPIABI_Datatype type;
  int peer, tag;
};

MessageCall sent(const void* from, int count, MPIABI_Datatype type, int peer, int tag) {
  return {LIGHTCC_SEND, from, nullptr, count, type, peer, tag};
}
MessageCall received(void* to, int count, MPIABI_Datatype type, int peer, int tag) {
  return {LIGHTCC_RECV, nullptr, to, count, type, peer, tag};
}

void check(const MessageCall& message, const Communicator& communicator) {
  counted(message.count, element_of(message.type));
  if (message.peer < 0 || message.peer >= communicator.size())
    throw Error(Code::invalid_argument, "there is no rank " + std::to_string(message.peer) + " in a communicator of " +
                                            std::to_string(communicator.size()));
  if (message.tag < 0 || message.tag >= int(kTags))
    throw Error(Code::invalid_argument, "the tag " + std::to_string(message.tag) + " is not below " +
                                            std::to_string(kTags));
}

// What was checked. Communicators that share a group have tags of their own in it.
int64_t start(const MessageCall& message, Communicator& communicator) {
  const int64_t bytes = message.count * element_of(message.type).bytes;
  if (message.to) expect_writes(message.to, bytes);
  const lightcc_tensor tensor{message.from, message.to, &bytes, LIGHTCC_UINT8, 1, {}};
  const std::string name = communicator.next_message_name();
  lightcc_request request = request_of(message.kind, name, communicator, tensor);
  request.root = communicator.size() == 1 ? lightcc_rank() : communicator.place_in_group(message.peer);
  request.tag = int32_t(uint32_t(communicator.number) * kTags + uint32_t(message.tag));
  return begin(request);
}

int64_t start(const MessageCall& message, MPIABI_Comm handle) {
  const auto communicator = process().communicator(handle);
  check(message, *communicator);
  return start(message, *communicator);
}

// Both go their way, whatever becomes of the other; only then may the caller's memory be used again.
void exchange(const MessageCall& out, const MessageCall& in, MPIABI_Comm handle) {
  const auto communicator = process().communicator(handle);
  check(out, *communicator);
  check(in, *communicator);
  const int64_t receiving = start(in, *communicator);
  int64_t sending = 0;
  const int sent = guard([&] {
    sending = start(out, *communicator);
    finish(sending);
  });
  finish(receiving);
  if (sent != MPIABI_SUCCESS) throw Error(Code(sent), last_error());
}

}  // namespace
}  // namespace lightcc::mpiabi

using namespace lightcc::mpiabi;

int MPIABI_Isend(const void* from, int count, MPIABI_Datatype type, int to, int tag, MPIABI_Comm handle,
                 MPIABI_Request* request) {
  *request = MPIABI_REQUEST_NULL;
  return guard([&] { *request = MPIABI_Request(start(sent(from, count, type, to, tag), handle)); });
}

int MPIABI_Irecv(void* to, int count, MPIABI_Datatype type, int from, int tag, MPIABI_Comm handle,
                 MPIABI_Request* request) {
  *request = MPIABI_REQUEST_NULL;
  return guard([&] { *request = MPIABI_Request(start(received(to, count, type, from, tag), handle)); });
}

int MPIABI_Wait(MPIABI_Request* request, MPIABI_Status*) {
  return guard([&] {
    if (const MPIABI_Request handle = std::exchange(*request, MPIABI_REQUEST_NULL)) finish(int64_t(handle));
  });
}

int MPIABI_Sendrecv(const void* from, int sent_count, MPIABI_Datatype sent_type, int to, int sent_tag, void* into,
                    int received_count, MPIABI_Datatype received_type, int source, int received_tag,
                    MPIABI_Comm handle, MPIABI_Status*) {
  return guard([&] {
    exchange(sent(from, sent_count, sent_type, to, sent_tag),
             received(into, received_count, received_type, source, received_tag), handle);
  });
}
