#include "harp_plugin/core/packet.h"

#include <bit>

#include "base/hmac.h"

namespace harp {

static_assert(std::endian::native == std::endian::little, "values travel as they lie");

namespace {

// Writes values one after the other.
class Writer {
 public:
  explicit Writer(uint8_t* to) : begin_(to), at_(to) {}
  template <class T> Writer& put(T value) {
    std::memcpy(at_, &value, sizeof value);
    at_ += sizeof value;
    return *this;
  }
  size_t bytes() const { return size_t(at_ - begin_); }

 private:
  uint8_t* begin_;
  uint8_t* at_;
};

// Reads them; past the end it gives zeros and is no longer ok().
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  template <class T> T get() {
    T value{};
    if (bytes_.size() - at_ < sizeof value) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  bool ok() const { return ok_; }
  bool ok_and_empty() const { return ok_ && at_ == bytes_.size(); }
  size_t used() const { return at_; }

 private:
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

constexpr size_t kLongestAck = 4 + 1 + 8 * kMostRanges, kLongestGrant = 2 + 2 + 4 * kMostGrants;
static_assert(kHeaderBytes + kLongestGrant + kLongestAck <= kMostControlBytes, "an ACK may ride on any GRANT");

constexpr uint32_t kLargestPayload = 65520;
constexpr uint32_t kMostEagerMessages = 1024, kMostStreamFrames = 1 << 14;

}  // namespace

uint16_t cookie_of(const std::string& secret) {
  uint16_t cookie;
  std::memcpy(&cookie, lightcc::hmac_sha256(secret, "harp cookie").data(), sizeof cookie);
  return cookie & uint16_t(~kPathNumber);
}

size_t write_ack(const AckBody& ack, uint8_t* to) {
  Writer writer(to);
  writer.put(uint32_t(std::min<uint64_t>(ack.delay_ns / 1000, UINT32_MAX))).put(uint8_t(ack.count));
  writer.put(uint32_t(ack.ranges[0].last));
  for (uint32_t i = 0; i < ack.count; ++i) {
    if (i > 0) writer.put(uint32_t(ack.ranges[i - 1].first - ack.ranges[i].last - 1));
    writer.put(uint32_t(ack.ranges[i].last - ack.ranges[i].first + 1));
  }
  return writer.bytes();
}

std::optional<AckBody> read_ack(std::span<const uint8_t> body, uint64_t expected) {
  Reader reader(body);
  AckBody ack;
  ack.delay_ns = uint64_t(reader.get<uint32_t>()) * 1000;
  ack.count = reader.get<uint8_t>();
  if (!reader.ok() || ack.count == 0 || ack.count > kMostRanges) return std::nullopt;
  uint64_t last = expand(reader.get<uint32_t>(), expected);
  for (uint32_t i = 0; i < ack.count; ++i) {
    if (i > 0) {
      const uint64_t gap = reader.get<uint32_t>();
      if (gap == 0 || gap >= ack.ranges[i - 1].first) return std::nullopt;
      last = ack.ranges[i - 1].first - gap - 1;
    }
    const uint64_t length = reader.get<uint32_t>();
    if (length == 0 || length > last + 1) return std::nullopt;
    ack.ranges[i] = {last - length + 1, last};
  }
  if (!reader.ok_and_empty()) return std::nullopt;
  return ack;
}

size_t write_grant(const GrantBody& grant, uint8_t* to) {
  Writer writer(to);
  writer.put(grant.first).put(grant.count);
  for (uint16_t i = 0; i < grant.count; ++i) writer.put(grant.capacity[i]);
  return writer.bytes();
}

std::optional<GrantBody> read_grant(std::span<const uint8_t> body, size_t* used) {
  Reader reader(body);
  GrantBody grant;
  grant.first = reader.get<uint16_t>();
  grant.count = reader.get<uint16_t>();
  if (!reader.ok() || grant.count == 0 || grant.count > kMostGrants) return std::nullopt;
  for (uint16_t i = 0; i < grant.count; ++i) grant.capacity[i] = reader.get<uint32_t>();
  if (!reader.ok()) return std::nullopt;
  *used = reader.used();
  return grant;
}

size_t write_credit(const CreditBody& credit, uint8_t* to) { return Writer(to).put(credit.limit).bytes(); }

std::optional<CreditBody> read_credit(std::span<const uint8_t> body, size_t* used) {
  Reader reader(body);
  const CreditBody credit{reader.get<uint32_t>()};
  if (!reader.ok()) return std::nullopt;
  *used = reader.used();
  return credit;
}

size_t write_open(const OpenBody& open, uint8_t* to) {
  return Writer(to)
      .put(open.nonce)
      .put(open.conn)
      .put(open.first_number)
      .put(open.payload)
      .put(open.receive_packets)
      .put(open.eager_bytes)
      .put(open.eager_messages)
      .put(open.stream_frames)
      .put(uint8_t(open.mode))
      .put(open.paths)
      .bytes();
}

std::optional<OpenBody> read_open(std::span<const uint8_t> body) {
  Reader reader(body);
  OpenBody open;
  open.nonce = reader.get<Nonce>();
  open.conn = reader.get<uint32_t>();
  open.first_number = reader.get<uint64_t>();
  open.payload = reader.get<uint32_t>();
  open.receive_packets = reader.get<uint32_t>();
  open.eager_bytes = reader.get<uint32_t>();
  open.eager_messages = reader.get<uint32_t>();
  open.stream_frames = reader.get<uint32_t>();
  const auto mode = reader.get<uint8_t>();
  open.paths = reader.get<uint8_t>();
  if (!reader.ok_and_empty() || mode > uint8_t(Mode::stream)) return std::nullopt;
  open.mode = Mode(mode);
  const bool sizes = open.payload >= kOffsetUnit && open.payload <= kLargestPayload &&
                     open.payload % kOffsetUnit == 0 && open.receive_packets > 0;
  const bool counts = open.eager_messages <= kMostEagerMessages && open.stream_frames > 0 &&
                      open.stream_frames <= kMostStreamFrames && open.paths > 0 && open.paths <= kMostPaths;
  if (open.conn == 0 || open.first_number >> 62 != 0 || !sizes || !counts) return std::nullopt;
  return open;
}

size_t write_close(const CloseBody& close, uint8_t* to) { return Writer(to).put(uint8_t(close.reason)).bytes(); }

std::optional<CloseBody> read_close(std::span<const uint8_t> body) {
  Reader reader(body);
  const auto reason = reader.get<uint8_t>();
  if (!reader.ok_and_empty() || reason > uint8_t(CloseReason::failed)) return std::nullopt;
  return CloseBody{CloseReason(reason)};
}

}  // namespace harp
