// Messages over lightcc: bytes, whose lengths differ from call to call, so each is a request of its own.
#include <algorithm>
#include <map>

#include "api/lightcc.h"
#include "base/error.h"
#include "embedding/transport.h"

namespace lightcc::embedding {
namespace {

void expect_done(int64_t status) {
  if (status < 0 || status > LIGHTCC_PENDING) throw Error(Code(status < 0 ? -status : status), lightcc_error());
}

class LightccMessage : public PendingMessage {
 public:
  // spare: memory for what comes, and where it goes back to while its capacity lasts.
  LightccMessage(const std::string& name, int group, const OutgoingSegments& out, std::vector<Buffer>& spare)
      : spare_(spare) {
    if (!spare.empty()) {
      incoming = std::move(spare.back());
      spare.pop_back();
    }
    int64_t bytes = 0;
    for (int32_t n : out.bytes) bytes += n;
    const lightcc_tensor tensor{out.data, nullptr, &bytes, LIGHTCC_UINT8, 1, {}};
    lightcc_request request{};
    request.size = sizeof request;
    request.tensor_size = sizeof tensor;
    request.tensors = &tensor;
    request.count = 1;
    request.kind = LIGHTCC_ALLTOALL;
    request.group = group;
    request.name = name.c_str();
    request.splits = out.bytes.data();
    request.allocate = allocate;
    request.received = note_received;
    request.context = this;
    handle_ = lightcc_submit(&request);
    expect_done(std::min<int64_t>(handle_, 0));
  }
  // What is still under way writes to this object's memory. Only a group that is closed early comes here: it waits.
  ~LightccMessage() override {
    while (handle_ && lightcc_finish(handle_, 1000) == LIGHTCC_PENDING) {
    }
    if (spare_.size() < spare_.capacity()) spare_.push_back(std::move(incoming));
  }
  bool finish(int timeout_ms) override {
    if (!handle_) return true;
    const int status = lightcc_finish(handle_, timeout_ms);
    if (status == LIGHTCC_PENDING) return false;
    handle_ = 0;
    expect_done(status);
    return true;
  }

 private:
  static void* allocate(void* self, int, const int64_t* shape, int) {
    try {
      return static_cast<LightccMessage*>(self)->incoming.reserve(size_t(std::max<int64_t>(shape[0], 64)));
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }
  static void note_received(void* self, int, const int32_t* rows, int count) {
    static_cast<LightccMessage*>(self)->received.assign(rows, rows + count);
  }
  std::vector<Buffer>& spare_;
  int64_t handle_ = 0;
};

class LightccTransport : public Alltoalls {
 public:
  explicit LightccTransport(int group) : group_(group) { incoming_.reserve(kKept); }
  ~LightccTransport() override {
    for (auto& [memory, bytes] : free_) lightcc_free(memory);
  }

  // The smallest that is large enough of those that came back.
  std::byte* outgoing(size_t bytes) override {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    if (best != free_.end()) {
      used_.insert(*best);
      std::byte* memory = best->first;
      free_.erase(best);
      return memory;
    }
    const size_t room = std::max(bytes + bytes / 4, size_t(4096));
    auto* memory = static_cast<std::byte*>(lightcc_alloc(int64_t(room)));
    if (!memory) throw std::bad_alloc();
    used_[memory] = room;
    return memory;
  }
  void give_back(std::byte* memory) override {
    auto it = used_.find(memory);
    free_.insert(*it);
    used_.erase(it);
    if (free_.size() <= kKept) return;
    auto least = std::min_element(free_.begin(), free_.end(), [](auto& a, auto& b) { return a.second < b.second; });
    lightcc_free(least->first);
    free_.erase(least);
  }
  std::unique_ptr<PendingMessage> alltoall(const std::string& name, const OutgoingSegments& out) override {
    return std::make_unique<LightccMessage>(name, group_, out, incoming_);
  }

 private:
  static constexpr size_t kKept = 8;
  int group_;
  std::vector<Buffer> incoming_;
  std::map<std::byte*, size_t> free_, used_;
};

}  // namespace

std::unique_ptr<Alltoalls> lightcc_transport(int group, int) { return std::make_unique<LightccTransport>(group); }

}  // namespace lightcc::embedding
