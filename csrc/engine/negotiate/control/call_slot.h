// What two members on different hosts tell each other of a call that may skip negotiation
// (engine/run/remote_fast_path.h). It travels on the control plane, between its messages, and is none of them: the
// bytes of the call's data behind it are used where they arrived.
#pragma once
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace lightcc {

struct CallSlot {
  static constexpr uint8_t kTag = 0xff;  // the first byte; no message (message.h) begins with it
  uint8_t tag = kTag;
  uint8_t refusal = 0;
  uint8_t reserved[6] = {};
  uint64_t turn = 0;
  uint64_t hash = 0;                     // of the call; its data follow
};
static_assert(sizeof(CallSlot) == 24);

inline std::string encode(const CallSlot& slot, std::string_view data = {}) {
  std::string bytes;
  bytes.reserve(sizeof slot + data.size());
  bytes.append(reinterpret_cast<const char*>(&slot), sizeof slot).append(data);
  return bytes;
}

// nullopt: it is something else.
inline std::optional<CallSlot> call_slot(std::string_view bytes) {
  if (bytes.empty() || uint8_t(bytes[0]) != CallSlot::kTag) return std::nullopt;
  CallSlot slot;
  if (bytes.size() < sizeof slot) throw Error(Code::internal, "a control message is malformed");
  std::memcpy(&slot, bytes.data(), sizeof slot);
  return slot;
}

}  // namespace lightcc
