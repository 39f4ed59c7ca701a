#include "engine/run/nccl_connections.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace lightcc {
namespace {

const std::string kWithoutNccl = "; with LIGHTCC_NCCL=0 on all ranks, tensors of GPUs go through the host";

}  // namespace

std::unique_ptr<Work> start_on_host(const Selector& selector, const Collective& c) {
  const Row& row = selector.choose(c);
  return row.backend->start(c, row.algorithm);
}

std::unique_ptr<Work> start_gather(const Group& group, const Selector& selector, const void* own, size_t bytes,
                                   void* all) {
  Collective c{};
  c.kind = Kind::allgather;
  c.index = group.index();
  c.size = group.size();
  c.input = own;
  c.output = all;
  c.counts.assign(size_t(c.size), int64_t(bytes));
  return start_on_host(selector, c);
}

void NcclConnections::plan(std::vector<int> members, std::unique_ptr<NcclCommunicator>* place) {
  planned_.push_back({std::move(members), place});
}

void NcclConnections::plan_2d(const Hosts& nodes, NcclCommunicators& to) {
  const auto has_own = [&](const auto& members) { return std::ranges::count(members, group_.index()) > 0; };
  const auto& node = *std::ranges::find_if(nodes, has_own);
  const auto own = std::ranges::find(node, group_.index()) - node.begin();
  std::vector<int> cross;
  for (const auto& other : nodes) cross.push_back(other[size_t(own)]);
  plan(node, &to.local);
  plan(std::move(cross), &to.cross);
}

bool NcclConnections::step() {
  if (own_ids_.empty()) return make_ids(), true;
  if (!gather_) return connect();
  if (!gather_->done() && !gather_->step()) return false;
  if (gather_->done()) gather_.reset();
  return true;
}

void NcclConnections::make_ids() {
  const NcclFunctions& functions = nccl(config_.nccl_library);
  own_ids_.resize(planned_.size());
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (planned_[i].members[0] != group_.index()) continue;
    if (const int status = functions.GetUniqueId(&own_ids_[i]); status != kNcclSuccess)
      throw Error(Code::internal, std::string("NCCL made no id for a communicator: ") +
                                      functions.GetErrorString(status) + " (" + functions.GetLastError(nullptr) + ")");
  }
  ids_.resize(size_t(group_.size()) * planned_.size());
  gather_ = start_gather(group_, selector_, own_ids_.data(), own_ids_.size() * sizeof(NcclUniqueId), ids_.data());
}

// All members make theirs in the same order, one after the other.
bool NcclConnections::connect_next() {
  if (begun_ > 0 && !(*planned_[begun_ - 1].place)->ready()) return false;
  if (begun_ == planned_.size()) return done_ = true;
  const auto& [members, place] = planned_[begun_];
  const auto own = std::ranges::find(members, group_.index()) - members.begin();
  *place = std::make_unique<NcclCommunicator>(
      cuda(config_.cuda_library), nccl(config_.nccl_library), device_, int(members.size()), int(own),
      ids_[size_t(members[0]) * planned_.size() + begun_]);
  ++begun_;
  return true;
}

bool NcclConnections::connect() {
  try {
    return connect_next();
  } catch (const PeerSuspected& error) {
    throw PeerSuspected(error.code(), error.what() + kWithoutNccl);
  } catch (const Error& error) {
    throw Error(error.code(), error.what() + kWithoutNccl);
  }
}

}  // namespace lightcc
