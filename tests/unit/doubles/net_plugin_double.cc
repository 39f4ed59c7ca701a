// A network plugin of NCCL's for tests, versions 6 to 9, within one process. It is slow on purpose and keeps no order:
// connecting takes several calls, isend and irecv often cannot begin, a message takes some tests to arrive, and a later
// one may be over before an earlier one. Small messages are sent before they are received, as by sockets. And it is
// strict: memory is registered while it is used, a listener accepts one connection, a communicator has at most 32
// requests under way, and so on. Whoever breaks that gets kInvalidUsage, and is counted.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "nccl_abi/nccl_net.h"

namespace {

using nccl::Result;

constexpr size_t kMostUnderWay = 32, kSmall = 1000, kMostBuffered = 20;
constexpr int kCallsToConnect = 3;

std::mutex mutex;
std::minstd_rand dice(1);
int broken = 0;  // a sum of these
enum Broken { everything = 1, sending = 2, registering = 4 };
int device_count = 3, violations = 0, started = 0;

Result refused() { return ++violations, nccl::kInvalidUsage; }

struct Message {
  const uint8_t* from = nullptr;  // nullptr: it is not sent yet
  uint8_t* to = nullptr;          // nullptr: nor received
  size_t bytes = 0, capacity = 0;
  std::vector<uint8_t> buffered;
  int tests_left = int(dice() % 12);
  bool sent = false, arrived = false;
};
struct Channel {  // one direction
  std::vector<std::shared_ptr<Message>> messages;
  size_t sends = 0, receives = 0, all_arrived = 0;
  bool sender_gone = false, receiver_gone = false;
};
struct Communicator;
struct Request {
  Communicator* owner;
  std::shared_ptr<Message> message;
};
struct Communicator {
  std::shared_ptr<Channel> channel;
  bool is_sender = false;
  std::map<Request*, std::unique_ptr<Request>> under_way{};
  std::map<void*, std::pair<uint8_t*, size_t>> memory{};
};
struct Listener {
  uint64_t id;
  std::shared_ptr<Channel> channel{};
  int accept_calls = 0;
  bool accepted = false;
};
struct Handle {
  uint64_t id;
  int calls;  // as NCCL's own transports do, the state of connecting is kept in the handle
};
std::map<uint64_t, Listener*> listeners;
uint64_t last_id = 0;

std::shared_ptr<Message> message(Channel& channel, size_t number) {
  while (channel.messages.size() <= number) channel.messages.push_back(std::make_shared<Message>());
  return channel.messages[number];
}

void tick(Channel& channel) {
  for (size_t i = channel.all_arrived; i < channel.messages.size(); ++i) {
    Message& one = *channel.messages[i];
    if (one.arrived || !one.from || !one.to || --one.tests_left >= 0) continue;
    std::memcpy(one.to, one.from, std::min(one.bytes, one.capacity));
    one.sent = one.arrived = true;
  }
  while (channel.all_arrived < channel.messages.size() && channel.messages[channel.all_arrived]->arrived)
    ++channel.all_arrived;
}

Result init(nccl::Logger) { return ++started, nccl::kSuccess; }

Result devices(int* count) { return *count = device_count, nccl::kSuccess; }

template <class Properties> Result properties(int device, Properties* properties) {
  static char names[3][12] = {"for GPUs", "double1", "double2"};
  *properties = {};
  properties->name = names[device];
  properties->pointer_support = device == 0 ? nccl::kCudaPointers : nccl::kHostPointers;
  properties->max_receives = 1;
  return nccl::kSuccess;
}

Result listen(int, void* handle, void** listener) {
  std::lock_guard lock(mutex);
  auto* made = new Listener{++last_id};
  listeners[made->id] = made;
  const Handle own{made->id, 0};
  std::memcpy(handle, &own, sizeof own);
  *listener = made;
  return nccl::kSuccess;
}

Result connect(int, void* handle, void** communicator, void** on_device) {
  std::lock_guard lock(mutex);
  *communicator = nullptr;
  if (!on_device) return refused();
  Handle own;
  std::memcpy(&own, handle, sizeof own);
  const auto found = listeners.find(own.id);
  if (found == listeners.end()) return nccl::kRemoteError;
  if (found->second->channel) return refused();
  const bool is_there = ++own.calls == kCallsToConnect;
  std::memcpy(handle, &own, sizeof own);
  if (!is_there) return nccl::kSuccess;
  found->second->channel = std::make_shared<Channel>();
  *communicator = new Communicator{found->second->channel, true};
  return nccl::kSuccess;
}

Result accept(void* from, void** communicator, void** on_device) {
  std::lock_guard lock(mutex);
  *communicator = nullptr;
  auto* listener = static_cast<Listener*>(from);
  if (listener->accepted || !on_device) return refused();
  if (!listener->channel || ++listener->accept_calls < kCallsToConnect) return nccl::kSuccess;
  listener->accepted = true;
  *communicator = new Communicator{listener->channel, false};
  return nccl::kSuccess;
}

template <class Size> Result reg_mr(void* of, void* data, Size bytes, int pointer, void** memory) {
  std::lock_guard lock(mutex);
  if (pointer != nccl::kHostPointers) return refused();
  if (broken & registering) return nccl::kSystemError;
  *memory = new char;
  static_cast<Communicator*>(of)->memory[*memory] = {static_cast<uint8_t*>(data), size_t(bytes)};
  return nccl::kSuccess;
}

Result dereg_mr(void* of, void* memory) {
  std::lock_guard lock(mutex);
  if (static_cast<Communicator*>(of)->memory.erase(memory) != 1) return refused();
  delete static_cast<char*>(memory);
  return nccl::kSuccess;
}

bool may_begin(const Communicator& of, const uint8_t* data, size_t bytes, void* memory) {
  const auto found = of.memory.find(memory);
  if (found == of.memory.end() || of.under_way.size() >= kMostUnderWay) return false;
  const auto& [begin, size] = found->second;
  return data >= begin && data + bytes <= begin + size;
}

void* begun(Communicator& of, std::shared_ptr<Message> message) {
  auto made = std::make_unique<Request>(Request{&of, std::move(message)});
  Request* const request = made.get();
  of.under_way[request] = std::move(made);
  return request;
}

template <class Size> Result isend(void* to, void* data, Size bytes, int, void* memory, void** request) {
  std::lock_guard lock(mutex);
  *request = nullptr;
  auto& of = *static_cast<Communicator*>(to);
  if (broken & (everything | sending)) return nccl::kSystemError;
  if (!may_begin(of, static_cast<uint8_t*>(data), size_t(bytes), memory)) return refused();
  if (dice() % 3 == 0) return nccl::kSuccess;
  const auto one = message(*of.channel, of.channel->sends++);
  one->from = static_cast<uint8_t*>(data);
  one->bytes = size_t(bytes);
  if (one->bytes <= kSmall && of.channel->sends < of.channel->all_arrived + kMostBuffered) {
    one->buffered.assign(one->from, one->from + one->bytes);
    one->from = one->buffered.data();
    one->sent = true;
  }
  *request = begun(of, one);
  return nccl::kSuccess;
}

template <class Size>
Result irecv(void* from, int n, void** data, Size* bytes, int*, void** memory, void** request) {
  std::lock_guard lock(mutex);
  *request = nullptr;
  auto& of = *static_cast<Communicator*>(from);
  if (n != 1 || !may_begin(of, static_cast<uint8_t*>(data[0]), size_t(bytes[0]), memory[0])) return refused();
  if (dice() % 3 == 0) return nccl::kSuccess;
  const auto one = message(*of.channel, of.channel->receives++);
  one->to = static_cast<uint8_t*>(data[0]);
  one->capacity = size_t(bytes[0]);
  std::memset(one->to, 0xdd, one->capacity);  // what stood there is over
  *request = begun(of, one);
  return nccl::kSuccess;
}

Result test(void* which, int* done, int* bytes) {
  std::lock_guard lock(mutex);
  auto* request = static_cast<Request*>(which);
  Communicator& of = *request->owner;
  const auto kept = request->message;
  const Message& message = *kept;
  tick(*of.channel);
  *done = of.is_sender ? message.sent : message.arrived;
  if (bytes) *bytes = int(message.bytes);
  const bool is_lost = of.is_sender ? of.channel->receiver_gone : of.channel->sender_gone && !message.from;
  const bool is_over = *done || broken & everything || is_lost;
  if (!is_over) return nccl::kSuccess;
  of.under_way.erase(request);
  if (*done) return message.bytes <= message.capacity || of.is_sender ? nccl::kSuccess : refused();
  return broken & everything ? nccl::kSystemError : nccl::kRemoteError;
}

Result close(void* which) {
  std::lock_guard lock(mutex);
  auto* of = static_cast<Communicator*>(which);
  for (auto& one : of->channel->messages) {  // its memory is touched no more
    if (!of->is_sender) one->to = nullptr;
    else if (!one->sent) one->from = nullptr;
  }
  (of->is_sender ? of->channel->sender_gone : of->channel->receiver_gone) = true;
  const bool is_clean = of->memory.empty();
  delete of;
  return is_clean ? nccl::kSuccess : refused();
}

Result close_listen(void* which) {
  std::lock_guard lock(mutex);
  listeners.erase(static_cast<Listener*>(which)->id);
  delete static_cast<Listener*>(which);
  return nccl::kSuccess;
}

Result connect_v6(int device, void* handle, void** communicator) {
  void* on_device = nullptr;
  return connect(device, handle, communicator, &on_device);
}

Result accept_v6(void* from, void** communicator) {
  void* on_device = nullptr;
  return accept(from, communicator, &on_device);
}

template <class Net, class Properties, class Size, class RegisteredSize = Size> constexpr Net net() {
  Net net{};
  net.name = "double";
  net.init = init;
  net.devices = devices;
  net.get_properties = properties<Properties>;
  net.listen = listen;
  if constexpr (std::is_same_v<Net, nccl::NetV6>) {
    net.connect = connect_v6;
    net.accept = accept_v6;
  } else {
    net.connect = connect;
    net.accept = accept;
  }
  net.path.reg_mr = reg_mr<RegisteredSize>;
  net.path.dereg_mr = dereg_mr;
  net.path.isend = isend<Size>;
  net.path.irecv = irecv<Size>;
  net.path.test = test;
  net.path.close_send = close;
  net.path.close_recv = close;
  net.path.close_listen = close_listen;
  return net;
}

}  // namespace

extern "C" {

nccl::NetV6 ncclNetPlugin_v6 = net<nccl::NetV6, nccl::PropertiesV6, int>();
nccl::NetV7 ncclNetPlugin_v7 = net<nccl::NetV7, nccl::PropertiesV7, int>();
nccl::NetV8 ncclNetPlugin_v8 = net<nccl::NetV8, nccl::PropertiesV8, int, size_t>();
nccl::NetV9 ncclNetPlugin_v9 = net<nccl::NetV9, nccl::PropertiesV10, size_t>();

void net_plugin_double_break(int what) {  // Broken
  std::lock_guard lock(mutex);
  broken = what;
}

void net_plugin_double_devices(int count) { device_count = count; }  // the first of 3 is for GPUs alone

int net_plugin_double_violations() { return violations; }
int net_plugin_double_started() { return started; }

}  // extern "C"
