#include "net/harp/harp_frames.h"

#include "base/text.h"
#include "base/wire.h"

namespace lightcc {
namespace {

constexpr uint32_t kHelloMagic = 0x6861726c;  // "lrah" on the wire
constexpr size_t kMostWhy = 900;              // bytes

}  // namespace

std::string frame_of(const HarpHello& hello) {
  const auto& [epoch, group, lane, from, to] = hello;
  return WireWriter().put(kHelloMagic).put(epoch).put(group).put(lane).put(from).put(to).take();
}

std::optional<HarpHello> hello_in(std::string_view bytes) {
  try {
    WireReader in(bytes);
    if (in.get<uint32_t>() != kHelloMagic) return {};
    HarpHello hello{};
    hello.epoch = in.get<uint64_t>();
    hello.group = in.get<int32_t>(), hello.lane = in.get<int32_t>();
    hello.from = in.get<int32_t>(), hello.to = in.get<int32_t>();
    if (!in.empty()) return {};
    return hello;
  } catch (const Error&) {
    return {};
  }
}

std::string frame_of(const HarpNotice& notice) {
  return WireWriter().put(notice.code).put(truncate_utf8(notice.why, kMostWhy)).take();
}

HarpNotice notice_in(std::string_view bytes) {
  WireReader in(bytes);
  HarpNotice notice;
  notice.code = in.get_enum<Code>(int(Code::internal) + 1);
  notice.why = in.text();
  if (!in.empty()) WireReader::fail();
  return notice;
}

}  // namespace lightcc
