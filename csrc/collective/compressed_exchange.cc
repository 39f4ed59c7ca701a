#include "collective/compressed_exchange.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace lightcc {
namespace {

constexpr uint32_t kRefused = uint32_t(1) << 31;

}  // namespace

CompressedExchange::CompressedExchange(NodeLinks& links, const Collective& c, uint64_t number)
    : links_(links),
      codec_(c.codec),
      number_(number),
      layout_(lay_out_compressed(c, links, kCompressedPartBytes, sizeof(MessageHeader))) {
  for (const CompressedPart& part : layout_.parts) {
    messages_.emplace_back();
    for (const size_t bytes : part.message_bytes) messages_.back().push_back({.bytes = bytes});
  }
}

CompressedExchange::~CompressedExchange() {
  if (exchanged_ < parts()) links_.give_up();
  release();
}

void CompressedExchange::release() {
  lent_.release();
  messages_.clear();
}

MessageHeader CompressedExchange::header_of(size_t part) const {
  return {number_, uint32_t(part), uint32_t(layout_.parts[part].end - layout_.parts[part].begin)};
}

void CompressedExchange::lend(size_t part, size_t lane, std::shared_ptr<std::byte> memory) {
  messages_[part][lane].memory = std::move(memory);
  const MessageHeader header = header_of(part);
  std::memcpy(message(part, lane, links_.node()), &header, sizeof header);
}

// The rest of the message is nobody's to read, and zero, as what was in the memory is not for others.
void CompressedExchange::refuse(size_t part, size_t tensor) {
  MessageHeader header = header_of(part);
  header.tensors = kRefused + uint32_t(tensor);
  for (size_t lane = 0; lane < messages_[part].size(); ++lane) {
    std::memset(message(part, lane, links_.node()), 0, message_bytes(part, lane));
    std::memcpy(message(part, lane, links_.node()), &header, sizeof header);
  }
}

bool CompressedExchange::check(size_t part, size_t lane) {
  const LaneMessage& one = messages_[part][lane];
  bool is_whole = true;
  for (int node = 0; node < links_.nodes(); ++node) {
    MessageHeader header, expected = header_of(part);
    std::memcpy(&header, message(part, lane, node), sizeof header);
    if (header == expected) continue;
    const size_t tensor = header.tensors - kRefused;
    expected.tensors = header.tensors;
    if (header != expected || header.tensors < kRefused || tensor >= layout_.tensors.size())
      throw Error(Code::internal, "member " + std::to_string(one.flow->owner(node)) +
                                      " of the group sent the compressed gradients of another all-reduce");
    is_whole = false;
    if (no_memory_) continue;
    size_t bytes = 0;
    for (const CompressedShard& shard : layout_.tensors[tensor].shards)
      bytes += device_residual_bytes(size_t(shard.count), codec_.momentum > 0);
    no_memory_ = NoMemory{one.flow->owner(node), tensor, bytes};
  }
  return is_whole;
}

// As many parts are under way as there are flows, and one more each, so that none runs dry.
bool CompressedExchange::step(size_t ready) {
  bool moved = false;
  while (started_ < ready && started_ - exchanged_ < 2 * NodeLinks::kFlows) {
    start();
    moved = true;
  }
  for (size_t p = exchanged_; p < started_; ++p)
    for (LaneMessage& one : messages_[p])
      if (!one.work->done()) {
        moved |= one.work->step();
        if (one.work->done()) lent_.note(*one.flow);
      }
  const auto is_done = [](const LaneMessage& one) { return one.work->done(); };
  while (exchanged_ < started_ && std::ranges::all_of(messages_[exchanged_], is_done)) {
    ++exchanged_;
    moved = true;
  }
  return moved;
}

void CompressedExchange::start() {
  for (size_t lane = 0; lane < messages_[started_].size(); ++lane) {
    LaneMessage& one = messages_[started_][lane];
    one.flow = &links_.flow(links_.own_lanes().begin + int(lane), int64_t(started_));
    Collective c{};
    c.kind = Kind::allgather;
    c.index = links_.node();
    c.size = links_.nodes();
    c.counts.assign(size_t(c.size), int64_t(one.bytes));
    c.input = message(started_, lane, c.index);
    c.output = one.memory.get();
    one.work = one.flow->start(c);
  }
  ++started_;
}

int CompressedExchange::waiting_for() const {
  if (exchanged_ == started_) return -1;
  for (const LaneMessage& one : messages_[exchanged_])
    if (!one.work->done()) {
      const int owner = one.work->waiting_for();
      return owner < 0 ? -1 : one.flow->owner(owner);
    }
  return -1;
}

}  // namespace lightcc
