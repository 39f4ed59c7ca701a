// Compressed all-reduce, for groups on several nodes: a dense reduce-scatter among the members here; the owner of a
// shard adds what it has left behind and compresses the sum; the owners gather each other's messages; each adds them
// up; a dense all-gather here. After Shi et al., MLSys 2021 (HiTopKComm).
//
// 1. Each tensor is cut by itself among the lanes (node_links.h), whatever it travels with. So what is sent of it and
//    what is left behind depends on the tensor alone, and not on which tensors happened to be fused.
// 2. Messages are added up in the order of the nodes on all ranks: all end with equal bits.
// 3. The tensors pass through five queues, each in their order: reduce-scatter, compression, exchange, addition,
//    all-gather. Consecutive tensors share messages until these stand for kPartBytes of gradients.
// 4. As in hierarchical.h, members write only what they own until the all-gather, so the output may be the input; and
//    before that all-gather the owner has read what it owns of all inputs.
// 5. It uses the node's links alone: no other collective that uses them may be in flight.
#pragma once
#include <memory>

#include "collective/compressed_exchange.h"
#include "collective/node_links.h"

namespace lightcc {

// Whether an all-reduce of such elements is compressed among so many nodes: whether that makes fewer bytes.
bool compresses(const Codec&, DType, int nodes);
// Why it is not; "": it is.
std::string why_dense(const Codec&, DType, int nodes);

class CompressedBackend : public Backend {
 public:
  explicit CompressedBackend(std::shared_ptr<NodeLinks> links) : links_(std::move(links)) {}
  const char* name() const override { return "compressed"; }
  bool accepts(const Collective&) const override;
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

  // The messages of the next all-reduce, for whoever encodes and decodes them otherwise (engine/run/codec_run.h). It is
  // to the links and the other members what start() would be.
  std::unique_ptr<CompressedExchange> exchange(const Collective&);
  NodeLinks& links() const { return *links_; }

 private:
  const std::shared_ptr<NodeLinks> links_;
  uint64_t started_ = 0;
};

}  // namespace lightcc
