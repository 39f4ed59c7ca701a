// The messages of one compressed all-reduce: how they are laid out, and their exchange among the owners of each lane.
// Whoever encodes lends memory for them, a piece for each part and own lane, in which the messages of all nodes follow
// each other. What is sent is the same wherever it was encoded.
//
// A rank that has no memory for what it is to leave behind refuses the part: its message says so, and whoever looks at
// the part learns whose fault it is. The links stay in order.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "collective/compressed_layout.h"

namespace lightcc {

struct MessageHeader {  // of a message
  uint64_t number;   // of the all-reduce, among the compressed ones of the group
  uint32_t part, tensors;  // tensors: kRefused + which of the collective, where a rank has no memory for that one
  bool operator==(const MessageHeader&) const = default;
};

class CompressedExchange {
 public:
  // links: outlive it. number: of the all-reduce.
  CompressedExchange(NodeLinks& links, const Collective&, uint64_t number);
  ~CompressedExchange();  // if not all parts are exchanged, the links are given up
  CompressedExchange(const CompressedExchange&) = delete;
  CompressedExchange& operator=(const CompressedExchange&) = delete;

  const CompressedLayout& layout() const { return layout_; }
  size_t parts() const { return layout_.parts.size(); }
  // Of an own lane: how long each node's message is, and where it begins once there is memory.
  size_t message_bytes(size_t part, size_t lane) const { return messages_[part][lane].bytes; }
  std::byte* message(size_t part, size_t lane, int node) const {
    return messages_[part][lane].memory.get() + messages_[part][lane].bytes * size_t(node);
  }
  bool has_memory(size_t part, size_t lane) const { return messages_[part][lane].memory != nullptr; }
  // Memory for the messages of all nodes; the own one gets its header.
  void lend(size_t part, size_t lane, std::shared_ptr<std::byte> memory);
  void refuse(size_t part, size_t tensor);  // this rank has none for what it leaves behind of it; after lend()

  bool step(size_t ready);                  // so many parts have their own messages
  size_t exchanged() const { return exchanged_; }  // so many parts
  size_t started() const { return started_; }
  int waiting_for() const;                  // a member, or -1: none of another's
  // Looks at the headers of a part that is exchanged; false: it was refused, and has no values. Throws Error{internal}
  // if a message is of another all-reduce.
  bool check(size_t part, size_t lane);
  const std::optional<NoMemory>& no_memory() const { return no_memory_; }  // what check() has met
  void release();                           // the messages: nobody sends from their memory any more

 private:
  struct LaneMessage {
    const NodeLinks::Flow* flow = nullptr;
    size_t bytes = 0;  // of each node's
    std::shared_ptr<std::byte> memory = nullptr;
    std::unique_ptr<Work> work = nullptr;
  };
  MessageHeader header_of(size_t part) const;
  void start();

  NodeLinks& links_;
  const Codec codec_;
  const uint64_t number_;
  const CompressedLayout layout_;
  std::vector<std::vector<LaneMessage>> messages_;  // by part and own lane
  size_t started_ = 0, exchanged_ = 0;              // so many parts
  std::optional<NoMemory> no_memory_;
  LentMemory lent_;
};

}  // namespace lightcc
