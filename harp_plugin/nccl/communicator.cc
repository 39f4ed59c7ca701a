#include "harp_plugin/nccl/communicator.h"

#include <algorithm>

#include "base/error.h"
#include "harp_plugin/nccl/log.h"

namespace harp {

namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw lightcc::Error(lightcc::Code::invalid_argument, what);
}

void posted(NetRequest::Part& part, const void* data, size_t bytes) {
  part.ended = false;
  part.handle = nullptr;
  part.bytes.store(bytes, std::memory_order_relaxed);
  part.data.store(static_cast<const uint8_t*>(data), std::memory_order_release);
}

bool overlaps(const NetRequest::Part& part, const Memory& memory) {
  const uint8_t* data = part.data.load(std::memory_order_acquire);
  const size_t bytes = part.bytes.load(std::memory_order_relaxed);
  return data && bytes > 0 && data < memory.data + memory.bytes && memory.data < data + bytes;
}

// The connection takes as many requests as a communicator can have, so it does not block.
void begin(int status) {
  if (status != HARP_OK) throw lightcc::Error(lightcc::Code::internal, harp_error());
}

}  // namespace

nccl::Result result_of(int status) {
  switch (status) {
    case HARP_OK:
    case HARP_PENDING:
      return nccl::kSuccess;
    case HARP_INVALID_ARGUMENT:
      return nccl::kInvalidArgument;
    case HARP_TOO_LONG:
      return nccl::kInvalidUsage;
    case HARP_CANCELLED:
      return nccl::kInternalError;
    case HARP_LOCAL_FAULT:
      return nccl::kSystemError;
    default:
      return nccl::kRemoteError;
  }
}

Communicator::Communicator(SharedContext context, harp_connection* connection, bool grouped)
    : context_(std::move(context)), connection_(connection), grouped_(grouped) {
  for (NetRequest& request : requests_) request.owner = this;
}

Communicator::~Communicator() { harp_close(connection_); }

NetRequest* Communicator::take(int count) {
  for (NetRequest& request : requests_) {
    if (request.used) continue;
    if (request.telling && harp_test(request.telling, nullptr) == HARP_PENDING) continue;
    request.telling = nullptr;
    request.used = true;
    request.count = count;
    request.result = nccl::kSuccess;
    return &request;
  }
  return nullptr;
}

void Communicator::give_back(NetRequest& request) {
  for (NetRequest::Part& part : request.parts) part.data.store(nullptr, std::memory_order_relaxed);
  request.used = false;
}

nccl::Result Communicator::send(const void* data, size_t bytes, int tag, NetRequest** request) {
  *request = nullptr;
  require(bytes <= UINT32_MAX, "sending: a message has less than 4 GiB");
  require(data || bytes == 0, "sending: the address is NULL and the size is not 0");
  if (grouped_) {
    const nccl::Result result = hear_of_groups();
    if (result != nccl::kSuccess) return result;
  }
  NetRequest* made = take(1);
  if (!made) return nccl::kSuccess;
  NetRequest::Part& part = made->parts[0];
  posted(part, data, bytes);
  if (!grouped_) {
    begin(harp_send(connection_, data, bytes, &part.handle));
  } else if (!join(*made, tag)) {
    give_back(*made);
    return nccl::kSuccess;
  }
  *request = made;
  return nccl::kSuccess;
}

// Receives the groups that the other side has told of since.
nccl::Result Communicator::hear_of_groups() {
  for (;;) {
    NextGroup& next = expected_[next_expected_ % expected_.size()];
    if (next.handle) {
      size_t bytes = 0;
      const int status = harp_test(next.handle, &bytes);
      if (status == HARP_PENDING) return nccl::kSuccess;
      next.handle = nullptr;
      if (status != HARP_OK) return failed(status);
      const int count = next.group.count;
      if (bytes != sizeof next.group || count < 1 || count > nccl::kMostReceives) {
        warn("the peer has told of receives that make no sense: the connection ends here");
        harp_cancel(connection_);
        return nccl::kRemoteError;
      }
      announced_.push_back({.group = next.group, .sends = {}});
    } else if (next_expected_ >= expected_.size()) {
      return failed(harp_connected(connection_));  // it was here that the last group did not come
    }
    begin(harp_recv(connection_, &next.group, sizeof next.group, &next.handle));
    ++next_expected_;
  }
}

// The place of a send in the oldest group, if that has one free for its tag. A group is sent when it is full.
bool Communicator::join(NetRequest& request, int tag) {
  if (announced_.empty()) return false;
  Announced& oldest = announced_.front();
  const auto count = static_cast<size_t>(oldest.group.count);
  size_t place = 0;
  while (place < count && (oldest.sends[place] || oldest.group.tags[place] != tag)) ++place;
  if (place == count) return false;
  oldest.sends[place] = &request;
  if (++oldest.filled < count) return true;
  for (size_t i = 0; i < count; ++i) {
    NetRequest::Part& part = oldest.sends[i]->parts[0];
    begin(harp_send(connection_, part.data.load(), part.bytes.load(), &part.handle));
  }
  announced_.pop_front();
  return true;
}

nccl::Result Communicator::receive(int count, void** data, const size_t* capacities, const int* tags,
                                   NetRequest** request) {
  *request = nullptr;
  const int most = grouped_ ? nccl::kMostReceives : 1;
  require(count >= 1 && count <= most, "receiving into " + std::to_string(count) + " buffers at once: at most " +
                                           std::to_string(most) + " here; see HARP_MAX_RECVS");
  for (int i = 0; i < count; ++i)
    require(data[i] || capacities[i] == 0, "receiving: the address is NULL and the size is not 0");
  NetRequest* made = take(count);
  if (!made) return nccl::kSuccess;
  for (int i = 0; i < count; ++i) {
    NetRequest::Part& part = made->parts[size_t(i)];
    posted(part, data[i], capacities[i]);
    begin(harp_recv(connection_, data[i], capacities[i], &part.handle));
  }
  if (grouped_) {
    made->group.count = count;
    std::copy_n(tags, count, made->group.tags.begin());
    begin(harp_send(connection_, &made->group, sizeof made->group, &made->telling));
  }
  *request = made;
  return nccl::kSuccess;
}

nccl::Result Communicator::test(NetRequest& request, bool* done, int* sizes) {
  *done = false;
  require(request.used, "testing: the request was over before");
  bool all_ended = true;
  for (int i = 0; i < request.count; ++i) {
    NetRequest::Part& part = request.parts[size_t(i)];
    if (part.ended) continue;
    const int status = progress(part);
    if (status == HARP_PENDING) {
      all_ended = false;
      continue;
    }
    part.ended = true;
    part.data.store(nullptr, std::memory_order_relaxed);
    if (status != HARP_OK && request.result == nccl::kSuccess) request.result = failed(status);
  }
  if (!all_ended) return nccl::kSuccess;
  *done = request.result == nccl::kSuccess;
  for (int i = 0; sizes && i < request.count; ++i) sizes[i] = static_cast<int>(request.parts[size_t(i)].moved);
  give_back(request);
  return request.result;
}

// HARP_PENDING, or how it ended.
int Communicator::progress(NetRequest::Part& part) {
  part.moved = 0;
  if (part.handle) return harp_test(part.handle, &part.moved);
  const int status = harp_connected(connection_);  // its group is not full yet
  return status == HARP_OK ? int(HARP_PENDING) : status;
}

void Communicator::deregister(const Memory& memory) {
  for (const NetRequest& request : requests_) {
    const auto uses = [&](const NetRequest::Part& part) { return overlaps(part, memory); };
    if (std::none_of(request.parts.begin(), request.parts.end(), uses)) continue;
    inform("memory of a request under way is deregistered: the connection ends here");
    return harp_cancel(connection_);
  }
}

// Said once for a connection that is over; each time for a message that was too long.
nccl::Result Communicator::failed(int status) {
  if (status == HARP_TOO_LONG || !warned_) warn(harp_error());
  warned_ |= status != HARP_TOO_LONG;
  return result_of(status);
}

}  // namespace harp
