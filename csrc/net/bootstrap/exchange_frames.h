// What ranks and rank 0's BootstrapExchange say to each other after the handshake: frames, a head and a body.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/types.h"
#include "base/wire.h"

namespace lightcc {

enum class FrameKind : uint32_t {
  greeting,  // rank 0, once: the rank's address as rank 0 sees it, and how many ns rank 0 will still wait for all
  note,      // a rank: round, size of its world, note
  all,       // rank 0: round, its own address as seen from elsewhere, the notes of all
  failure    // either: code, text
};
constexpr int kFrameKinds = 4;
constexpr size_t kFrameHeadBytes = sizeof(uint64_t) + sizeof(FrameKind);

struct Frame {
  FrameKind kind;
  std::string body;
};

inline std::string framed(FrameKind kind, std::string_view body) {
  std::string text = WireWriter().put(uint64_t(body.size())).put(kind).take();
  return text.append(body);
}
inline std::string failure_frame(const Error& error) {
  return framed(FrameKind::failure, WireWriter().put(error.code()).put(std::string_view(error.what())).take());
}
inline Error failure_in(const Frame& frame) {
  WireReader reader(frame.body);
  const Code code = reader.get_enum<Code>(int(Code::internal) + 1);
  return Error(code, reader.text());
}

// Bytes to frames. Throws Error{internal} if a frame is longer than `most` bytes or of no kind.
class FrameReader {
 public:
  explicit FrameReader(size_t most) : most_(most) {}
  void feed(std::string_view bytes) { bytes_.append(bytes); }
  std::optional<Frame> take() {
    if (bytes_.size() < kFrameHeadBytes) return {};
    WireReader head(bytes_);
    const auto length = head.get<uint64_t>();
    const auto kind = head.get_enum<FrameKind>(kFrameKinds);
    if (length > most_) WireReader::fail();
    if (bytes_.size() - kFrameHeadBytes < length) return {};
    Frame frame{kind, bytes_.substr(kFrameHeadBytes, length)};
    bytes_.erase(0, kFrameHeadBytes + length);
    return frame;
  }

 private:
  const size_t most_;
  std::string bytes_;
};

// How long the sides wait. Rank 0 gives up at its own deadline and tells who is missing; others do a little later.
constexpr uint64_t kClientGraceNs = 4'000'000'000;
constexpr uint64_t kClientFailureNoticeNs = 5'000'000'000;  // for telling rank 0 that this rank cannot go on
constexpr uint64_t kRootFailureNoticeNs = 5'000'000'000;    // for those not yet there to come and hear of a failure
constexpr uint64_t kOwnFailureNoticeNs = 5'000'000'000;     // of rank 0's own, for which nobody has waited until then
constexpr uint64_t kRootDeliveryNs = 2'000'000'000;         // after the deadline, for notes that are complete

// Texts that both sides use.
inline std::string text_of_some(const std::vector<int>& ranks) {  // "ranks 1, 4", at most 20 of them
  constexpr size_t kMost = 20;
  std::vector<int> some(ranks.begin(), ranks.begin() + ptrdiff_t(std::min(ranks.size(), kMost)));
  std::string text = (ranks.size() > 1 ? "ranks " : "rank ") + text_of(some);
  if (ranks.size() > kMost) text += " and " + std::to_string(ranks.size() - kMost) + " more";
  return text;
}
inline constexpr const char* kDidAllStart = "; did all ranks start? If they need longer, raise HOROVOD_START_TIMEOUT";
inline std::string start_timeout(uint64_t ns) {  // "HOROVOD_START_TIMEOUT (30 s)"
  const uint64_t tenths = (ns + 50'000'000) / 100'000'000;
  std::string text = "HOROVOD_START_TIMEOUT (" + std::to_string(tenths / 10);
  if (tenths % 10) text += "." + std::to_string(tenths % 10);
  return text + " s)";
}

}  // namespace lightcc
