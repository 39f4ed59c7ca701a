// A packet on the wire, and its checked reading. All numbers are little-endian; nothing here is trusted before
// read_packet() and the read_* functions of the bodies have passed it.
//
//    0       4       8              16                              32        bits
//    +-------+-------+---------------+-------------------------------+
//    |version| type  |     flags     |  conn (chosen by the receiver of the packet) ...
//    +-------+-------+---------------+-------------------------------+
//    bytes 2-5 conn   6-9 packet number (low half)   10-11 message   12-15 offset / 16   16-19 total   20-21 path
//
// With Ethernet, IPv4 and UDP before it the header ends at byte 64, so a payload lies on a cache line.
// The payload of DATA follows the header, the body of any other type does; with authentication an 8-byte tag ends it.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "harp_plugin/core/options.h"

namespace harp {

inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kHeaderBytes = 22;
inline constexpr size_t kTagBytes = 8;
inline constexpr uint32_t kOffsetUnit = 16;
inline constexpr size_t kMostControlBytes = 256;  // header and body of a packet other than DATA

enum class Type : uint8_t { data, ack, grant, probe, close, reset, open, open_ack };

// Flags of a header.
inline constexpr uint8_t kTagged = 1;    // the packet ends in a tag
inline constexpr uint8_t kStream = 2;    // DATA: a record of a stream; GRANT: credit of a stream
inline constexpr uint8_t kTooLong = 4;   // DATA without payload: the message is longer than the buffer that was granted
inline constexpr uint8_t kWithAck = 8;   // GRANT: an ACK body follows the grant's
inline constexpr uint8_t kNextAlike = 16;  // DATA of a message: the next message has as many bytes

struct Header {
  Type type = Type::data;
  uint8_t flags = 0;
  uint32_t conn = 0;
  uint32_t number = 0;   // low 32 bits of the packet number
  uint16_t message = 0;  // low 16 bits of the message's or record's number
  uint32_t offset = 0;   // of the payload in the message, in units of kOffsetUnit
  uint32_t total = 0;    // bytes of the whole message
  uint16_t path = 0;
  bool operator==(const Header&) const = default;
};

// With authentication the wire's `path` has a cookie made of the secret above the path's number: so a port can have the
// kernel drop what strangers send before it takes anybody's room.
inline constexpr uint16_t kPathNumber = kMostPaths - 1;
static_assert((kMostPaths & kPathNumber) == 0);
uint16_t cookie_of(const std::string& secret);  // without the bits of kPathNumber

struct [[gnu::packed, gnu::may_alias]] WireHeader {  // any bytes may be looked at as one
  uint8_t version_and_type, flags;
  uint32_t conn, number;
  uint16_t message;
  uint32_t offset, total;
  uint16_t path;
};
static_assert(sizeof(WireHeader) == kHeaderBytes);

inline void write_header(const Header& header, uint8_t* to) {  // kHeaderBytes
  *reinterpret_cast<WireHeader*>(to) = {uint8_t(kVersion << 4 | uint8_t(header.type)), header.flags, header.conn,
                                        header.number, header.message, header.offset, header.total, header.path};
}
inline std::optional<Header> read_header(std::span<const uint8_t> bytes) {  // of this version, with a known type
  if (bytes.size() < kHeaderBytes) return std::nullopt;
  const auto& wire = *reinterpret_cast<const WireHeader*>(bytes.data());
  const uint8_t version = wire.version_and_type >> 4, type = wire.version_and_type & 15;
  if (version != kVersion || type > uint8_t(Type::open_ack)) return std::nullopt;
  return Header{Type(type), wire.flags, wire.conn, wire.number, wire.message, wire.offset, wire.total, wire.path};
}

// Packet numbers first..last, both counted.
struct Range {
  uint64_t first, last;
  bool operator==(const Range&) const = default;
};

inline constexpr size_t kMostRanges = 16;
struct AckBody {
  uint64_t delay_ns = 0;  // how long the newest of them waited for this acknowledgement
  uint32_t count = 0;     // of ranges, at least 1
  std::array<Range, kMostRanges> ranges;  // newest first, with gaps between
};
// On the wire: delay in microseconds u32, count u8, largest number u32, its range's length u32, then (gap u32, length
// u32) for each further one. `expected` helps to make 64 bits out of 32: the number that would come next.
size_t write_ack(const AckBody&, uint8_t* to);
std::optional<AckBody> read_ack(std::span<const uint8_t> body, uint64_t expected);  // of exactly this length

inline constexpr size_t kMostGrants = 24;  // so that the longest ACK still fits behind them
struct GrantBody {
  uint16_t first = 0;  // low bits of the number of the first granted message
  uint16_t count = 0;  // 1..kMostGrants consecutive messages
  std::array<uint32_t, kMostGrants> capacity;
};
struct CreditBody {
  uint32_t limit = 0;  // low bits of the number of the first record that may not be sent yet
};
size_t write_grant(const GrantBody&, uint8_t* to);
// With kWithAck more follows; *used says how many bytes the grant took.
std::optional<GrantBody> read_grant(std::span<const uint8_t> body, size_t* used);
size_t write_credit(const CreditBody&, uint8_t* to);
std::optional<CreditBody> read_credit(std::span<const uint8_t> body, size_t* used);

enum class Mode : uint8_t { message, stream };

using Nonce = std::array<uint8_t, 16>;
struct OpenBody {  // of OPEN and of OPEN_ACK: what the side that sends it offers
  Nonce nonce{};   // of the listener's handle
  uint32_t conn = 0;             // that packets to the sender of this shall carry
  uint64_t first_number = 0;     // of the packets that it sends
  uint32_t payload = 0;          // the largest it receives: kOffsetUnit..65520, a multiple of kOffsetUnit
  uint32_t receive_packets = 0;  // >= 1
  uint32_t eager_bytes = 0;
  uint32_t eager_messages = 0;   // <= 1024
  uint32_t stream_frames = 0;    // 1..16384
  Mode mode = Mode::message;
  uint8_t paths = 1;             // 1..kMostPaths; those of the side that sends OPEN count
  bool operator==(const OpenBody&) const = default;
};
size_t write_open(const OpenBody&, uint8_t* to);
std::optional<OpenBody> read_open(std::span<const uint8_t> body);

enum class CloseReason : uint8_t { done, failed };  // failed: its requests were aborted
struct CloseBody {
  CloseReason reason = CloseReason::done;
};
inline constexpr size_t kCloseBytes = 1;
size_t write_close(const CloseBody&, uint8_t* to);
std::optional<CloseBody> read_close(std::span<const uint8_t> body);

// The number nearest to `expected` whose low bits are these.
inline uint64_t expand(uint32_t low, uint64_t expected) {
  uint64_t candidate = (expected & ~uint64_t(0xffffffff)) | low;
  if (candidate + 0x80000000u < expected) return candidate + 0x100000000u;
  if (candidate > expected + 0x80000000u && candidate >= 0x100000000u) return candidate - 0x100000000u;
  return candidate;
}
inline uint64_t expand(uint16_t low, uint64_t expected) {
  uint64_t candidate = (expected & ~uint64_t(0xffff)) | low;
  if (candidate + 0x8000u < expected) return candidate + 0x10000u;
  if (candidate > expected + 0x8000u && candidate >= 0x10000u) return candidate - 0x10000u;
  return candidate;
}

// Where a port sends to and receives from: the port's own bytes (a sockaddr, a name), equal if they are.
struct Address {
  std::array<uint8_t, 31> bytes{};
  uint8_t size = 0;
  bool operator==(const Address&) const = default;
};

// A packet to be sent: header and, for other types than DATA, its body in `head`; the payload where the sender has it.
struct TxPacket {
  const uint8_t* payload = nullptr;
  uint32_t payload_bytes = 0;
  uint16_t head_bytes = 0;
  uint16_t local = 0;           // which of the port's own addresses it leaves from
  const Address* to = nullptr;  // valid until the port has taken the packet
  bool tagged = false;
  std::array<uint8_t, kTagBytes> tag;  // travels last
  std::array<uint8_t, kMostControlBytes> head;
};

// A packet that has come. The port owns the bytes until it is released.
struct RxPacket {
  const uint8_t* head = nullptr;  // the header, and the body if it does not lie in `payload`
  uint32_t head_bytes = 0;
  const uint8_t* payload = nullptr;  // what follows, tag included: may lie elsewhere, also where it was expected
  uint32_t payload_bytes = 0;
  uint16_t local = 0;  // which of the port's own addresses it came to
  bool lendable = true;  // it may be kept for long; false: the port is short of frames
  Address from;
  uint64_t frame = 0;  // the port's name for what release() gives back
};

// One that has been read.
struct Packet {
  Header header;
  std::span<const uint8_t> body;  // what follows the header: with authentication a tag ends it, until it is verified
  const RxPacket& came;           // as the port gave it
};

// Ports may leave what follows the header behind it or put it elsewhere, not both.
inline std::optional<Packet> read_packet(const RxPacket& came) {
  const std::optional<Header> header = read_header({came.head, came.head_bytes});
  if (!header) return std::nullopt;
  if (came.head_bytes == kHeaderBytes) return Packet{*header, {came.payload, came.payload_bytes}, came};
  if (came.payload_bytes > 0) return std::nullopt;
  return Packet{*header, {came.head + kHeaderBytes, came.head_bytes - kHeaderBytes}, came};
}

}  // namespace harp
