// Messages between two ranks. In JAX they are ppermute, where a rank receives from one and sends to some, and
// all_to_all, where in each round all send to one and receive from another.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

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
  if (message.tag < 0)
    throw Error(Code::invalid_argument, "the tag " + std::to_string(message.tag) + " is negative");
}

// What was checked. Communicators that share a group have spaces of tags of their own in it.
int64_t start(const MessageCall& message, Communicator& communicator) {
  const int64_t bytes = message.count * element_of(message.type).bytes;
  if (message.to) expect_writes(message.to, bytes);
  const lightcc_tensor tensor{message.from, message.to, &bytes, LIGHTCC_UINT8, 1, {}};
  const std::string name = communicator.next_message_name();
  lightcc_request request = request_of(message.kind, name, communicator, tensor);
  request.root = communicator.size() == 1 ? lightcc_rank() : communicator.place_in_group(message.peer);
  request.tag = message.tag;
  request.space = communicator.number + 1;
  return begin(request);
}

// This thread's messages that it has not waited for yet: those of one operation of JAX, which begins them and waits for
// them in one function.
thread_local std::vector<int64_t> begun;

void begin_message(const MessageCall& message, Communicator& communicator, MPIABI_Request* request) {
  check(message, communicator);
  begun.push_back(start(message, communicator));
  *request = MPIABI_Request(begun.back());
}

void wait_for(MPIABI_Request* request) {
  const int64_t handle = int64_t(std::exchange(*request, MPIABI_REQUEST_NULL));
  if (handle == 0) return;
  std::erase(begun, handle);
  finish(handle);
}

// The body of each function that begins messages or waits for them. JAX gives up an operation at the first that fails,
// and frees the memory of all the others at once, which must not be under way any more then. Nor would anybody wait for
// them, or do what their peers do next: so the epoch ends, on all ranks, with this failure as its cause.
template <class Body> int guard_messages(Body body) {
  const int code = guard(body);
  if (code == MPIABI_SUCCESS || begun.empty()) return code;
  const std::string why = last_error();
  lightcc_abort(("a message of JAX has failed on rank " + std::to_string(lightcc_rank()) + ": " + why).c_str());
  for (const int64_t handle : std::exchange(begun, {})) guard([&] { finish(handle); });
  set_last_error(why);
  return code;
}

}  // namespace
}  // namespace lightcc::mpiabi

using namespace lightcc::mpiabi;

int MPIABI_Isend(const void* from, int count, MPIABI_Datatype type, int to, int tag, MPIABI_Comm handle,
                 MPIABI_Request* request) {
  *request = MPIABI_REQUEST_NULL;
  return guard_messages([&] {
    const auto communicator = process().communicator(handle);
    begin_message(sent(from, count, type, to, tag), *communicator, request);
  });
}

int MPIABI_Irecv(void* to, int count, MPIABI_Datatype type, int from, int tag, MPIABI_Comm handle,
                 MPIABI_Request* request) {
  *request = MPIABI_REQUEST_NULL;
  return guard_messages([&] {
    const auto communicator = process().communicator(handle);
    begin_message(received(to, count, type, from, tag), *communicator, request);
  });
}

int MPIABI_Wait(MPIABI_Request* request, MPIABI_Status*) {
  return guard_messages([&] { wait_for(request); });
}

int MPIABI_Sendrecv(const void* from, int sent_count, MPIABI_Datatype sent_type, int to, int sent_tag, void* into,
                    int received_count, MPIABI_Datatype received_type, int source, int received_tag,
                    MPIABI_Comm handle, MPIABI_Status*) {
  return guard_messages([&] {
    const auto communicator = process().communicator(handle);
    const MessageCall out = sent(from, sent_count, sent_type, to, sent_tag);
    MPIABI_Request receiving = MPIABI_REQUEST_NULL, sending = MPIABI_REQUEST_NULL;
    check(out, *communicator);  // before anything is begun
    begin_message(received(into, received_count, received_type, source, received_tag), *communicator, &receiving);
    begin_message(out, *communicator, &sending);
    wait_for(&sending);
    wait_for(&receiving);
  });
}
