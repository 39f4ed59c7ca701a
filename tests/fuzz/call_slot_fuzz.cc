// The fast path between two hosts: whatever the other member sends, this one takes it or refuses it with an Error, and
// adds up no bytes that have not come.
//
// The input is messages one behind the other: what this member does before it comes (0 nothing, 1 begins a call, 2
// steps, 3 refuses), how many bytes the call has, divided by four, the length in two bytes, and the message.
#include <cstdint>
#include <vector>

#include "engine/run/remote_fast_path.h"

namespace {

using namespace lightcc;

struct NoWork : Work {
  bool step() override { return true; }
  bool done() const override { return true; }
  int waiting_for() const override { return -1; }
};

void act(RemoteFastPath& path, int what, std::vector<float>& data) {
  if (what == 1 && path.ready() && !data.empty()) {
    Collective& call = path.call();
    call.dtype = DType::float32;
    call.op = ReduceOp::sum;
    call.count = int64_t(data.size());
    call.input = call.output = data.data();
    path.begin(0);
  } else if (what == 2 && path.active()) {
    path.step();
  } else if (what == 3 && !path.active()) {
    path.refuse_if_awaited(0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Group group(0, {0, 1}, 0, Topology::by_leader({0, 1}));
  RemoteFastPath path(group, [](std::string) {}, [](const Collective&) { return std::make_unique<NoWork>(); });
  std::vector<float> numbers;
  try {
    for (size_t at = 0; at + 4 <= size;) {
      const size_t length = size_t(data[at + 2]) | size_t(data[at + 3]) << 8;
      if (length > size - at - 4) return 0;
      if (!path.active()) numbers.assign(data[at + 1], 1);
      act(path, data[at] % 4, numbers);
      const std::string bytes(reinterpret_cast<const char*>(data) + at + 4, length);
      if (call_slot(bytes)) path.receive(bytes);
      at += 4 + length;
    }
  } catch (const Error&) {
    // Refused: it ends the epoch, and nobody crashes.
  }
  return 0;
}
