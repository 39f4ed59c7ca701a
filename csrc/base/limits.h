// How large what ranks announce may be: sums and products of anything within these stay far from overflow. A rank
// refuses a request of its own that is larger (engine/request/validate.h); a message of another rank that is larger is
// damaged (engine/negotiate/control). Here, because the negotiation may not include the engine around it, and
// is_countable() is base's.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lightcc {

inline constexpr size_t kMostDimensions = 64;                   // of a tensor
inline constexpr int64_t kMostElements = int64_t(1) << 43;      // of a tensor
inline constexpr int64_t kMostRequestBytes = int64_t(1) << 46;  // of all tensors of all members; also elements and rows
inline constexpr size_t kMostMessageBytes = size_t(256) << 20;  // of a control message, and so of the names in it

}  // namespace lightcc
