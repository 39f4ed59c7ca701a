// Whether all members of a group have the memory for a collective that they start together: a word of each, of which
// all find the largest on the host.
#pragma once
#include <memory>
#include <optional>

#include "engine/run/nccl_connections.h"

namespace lightcc {

class MemoryAgreement {
 public:
  // c: the collective. lacking: the tensor for which this member has none.
  MemoryAgreement(const Selector& selector, const Collective& c, std::optional<size_t> lacking) {
    if (lacking) own_ = uint64_t(c.index) << 32 | (*lacking + 1);
    Collective word{};
    word.kind = Kind::allreduce;
    word.index = c.index;
    word.size = c.size;
    word.dtype = DType::uint64;
    word.op = ReduceOp::max;
    word.input = &own_;
    word.output = &largest_;
    word.count = 1;
    work_ = start_on_host(selector, word);
  }
  MemoryAgreement(const MemoryAgreement&) = delete;
  MemoryAgreement& operator=(const MemoryAgreement&) = delete;

  Work& work() const { return *work_; }
  // Once that is done, alike on all members: whether one lacks it; which, and for which tensor.
  bool is_lacking() const { return largest_ != 0; }
  int member() const { return int(largest_ >> 32); }
  size_t tensor() const { return size_t(largest_ & 0xffffffff) - 1; }

 private:
  uint64_t own_ = 0, largest_ = 0;  // 0: there is memory
  std::unique_ptr<Work> work_;
};

}  // namespace lightcc
