#include "embedding/message.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/error.h"

namespace lightcc::embedding {
namespace {

size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

size_t checks_bytes(const TableHeader& head) { return head.checked ? padded(size_t(head.keys) * 4) : 0; }

class SegmentReader {
 public:
  SegmentReader(std::span<const std::byte> bytes, int from) : bytes_(bytes), from_(from) {}
  template <class T> T copy() {
    T value;
    std::memcpy(static_cast<void*>(&value), take(1, sizeof(T)), sizeof value);
    return value;
  }
  const std::byte* take(int64_t count, size_t each) {
    if (count < 0 || size_t(count) > bytes_.size() / each) fail();
    const size_t bytes = padded(size_t(count) * each);
    if (bytes > bytes_.size()) fail();
    const std::byte* at = bytes_.data();
    bytes_ = bytes_.subspan(bytes);
    return at;
  }
  [[noreturn]] void fail() const {
    throw Error(Code::internal, "a message of embedding tables from rank " + std::to_string(from_) + " is broken");
  }

 private:
  std::span<const std::byte> bytes_;
  int from_;
};

const char* name_of(Op op) {
  switch (op) {
    case Op::serve: return "serve";
    case Op::lookup: return "a lookup";
    case Op::update: return "an update";
    case Op::apply: return "the second half of an update";
    case Op::read: return "the end of a prefetched lookup";
    case Op::rows: return "rows";
    case Op::agree: return "an agreement";
  }
  return "nothing known";
}

std::string name_of(const TableHeader& head) { return std::string(head.name, strnlen(head.name, sizeof head.name)); }

// Different numbers have different texts.
std::string shortest(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

// What of a table the ranks must agree in, as text; equal texts: they do.
std::string text_of(const RankSegment& s) {
  std::string text = name_of(s.head.op);
  const auto bits = s.head.flags & ~16u;  // a rank may skip alone
  text += " with flags " + std::to_string(bits);
  if (s.head.op == Op::apply) text += ", scale " + shortest(s.head.scale);
  if (s.head.op == Op::read) text += ", number " + std::to_string(s.head.lookup);
  for (const TablePart& t : s.tables) text += ", table '" + name_of(t.head) + "'";
  return text;
}

[[noreturn]] void disagree(int a, const std::string& of_a, int b, const std::string& of_b) {
  throw Error(Code::mismatch, "ranks of an embedding call disagree: rank " + std::to_string(a) + " has " + of_a +
                                  ", rank " + std::to_string(b) + " has " + of_b);
}

void expect_equal_tables(const RankSegment& a, int rank_a, const RankSegment& b, int rank_b) {
  for (size_t i = 0; i < a.tables.size(); ++i) {
    const TableHeader &x = a.tables[i].head, &y = b.tables[i].head;
    const std::string table = "table '" + name_of(x) + "'";
    if (x.fingerprint != y.fingerprint)
      throw Error(Code::mismatch, table + " has another dim, dtype, optimizer, init, seed, min_count, admission, "
                                      "eviction, max_rows or owners on rank " +
                                      std::to_string(rank_b) + " than on rank " + std::to_string(rank_a));
    if (!(x.numbers == y.numbers))
      throw Error(Code::mismatch, table + " has another lr or other numbers of its optimizer on rank " +
                                      std::to_string(rank_b) + " than on rank " + std::to_string(rank_a));
  }
}

}  // namespace

RankSegment parse(std::span<const std::byte> bytes, int from) {
  SegmentReader reader(bytes, from);
  RankSegment segment;
  segment.head = reader.copy<CallHeader>();
  const CallHeader expected;
  if (segment.head.magic != expected.magic || segment.head.tables < 0 || segment.head.op < Op::serve ||
      segment.head.op > Op::agree)
    reader.fail();
  segment.head.text[sizeof segment.head.text - 1] = 0;
  for (int i = 0; i < segment.head.tables; ++i)
    segment.tables.push_back({reader.copy<TableHeader>(), {}, nullptr, nullptr});
  for (TablePart& part : segment.tables) {
    part.keys = {reinterpret_cast<const int64_t*>(reader.take(part.head.keys, 8)), size_t(part.head.keys)};
    if (part.head.checked) part.checks = reinterpret_cast<const uint32_t*>(reader.take(part.head.keys, 4));
    part.values = reader.take(part.head.value_bytes, 1);
  }
  return segment;
}

size_t bytes_of(const RankSegment& s) {
  size_t bytes = sizeof(CallHeader) + s.tables.size() * sizeof(TableHeader);
  for (const TablePart& t : s.tables)
    bytes += size_t(t.head.keys) * 8 + checks_bytes(t.head) + padded(size_t(t.head.value_bytes));
  return (bytes + 63) / 64 * 64;
}

void write_heads(const RankSegment& s, std::byte* to, std::vector<PartPlaces>& parts) {
  CallHeader head = s.head;
  head.tables = int32_t(s.tables.size());
  std::memcpy(to, &head, sizeof head);
  std::byte* at = to + sizeof head;
  for (const TablePart& t : s.tables) {
    std::memcpy(at, &t.head, sizeof t.head);
    at += sizeof t.head;
  }
  parts.clear();
  for (const TablePart& t : s.tables) {
    PartPlaces places{reinterpret_cast<int64_t*>(at), nullptr, nullptr};
    at += size_t(t.head.keys) * 8;
    if (t.head.checked) places.checks = reinterpret_cast<uint32_t*>(at);
    at += checks_bytes(t.head);
    places.values = at;
    at += padded(size_t(t.head.value_bytes));
    parts.push_back(places);
  }
}

int agreed(const std::vector<RankSegment>& calls) {
  int first = -1;
  for (int rank = 0; rank < int(calls.size()); ++rank) {
    const RankSegment& call = calls[size_t(rank)];
    if (call.head.op == Op::serve) continue;
    if (first < 0) {
      first = rank;
      continue;
    }
    const RankSegment& other = calls[size_t(first)];
    if (text_of(call) != text_of(other)) disagree(first, text_of(other), rank, text_of(call));
    expect_equal_tables(other, first, call, rank);
  }
  for (int rank = 0; rank < int(calls.size()); ++rank)
    if (const CallHeader& head = calls[size_t(rank)].head; head.status)
      throw Error(Code(head.status), "rank " + std::to_string(rank) + ": " + head.text);
  return first;
}

}  // namespace lightcc::embedding
