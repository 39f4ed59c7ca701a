#include "engine/run/nccl_setup.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace lightcc {
namespace {

const std::string kWithoutNccl = "; with LIGHTCC_NCCL=0 on all ranks, tensors of GPUs go through the host";

template <size_t N> void set_text(std::array<char, N>& to, const std::string& text) {
  to.fill(0);
  text.copy(to.data(), N - 1);
}

template <size_t N> std::string text_in(const std::array<char, N>& from) {
  return {from.begin(), std::ranges::find(from, 0)};
}

// FNV-1a, which is the same in each build. Not 0.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ uint8_t(c)) * 0x100000001b3;
  return std::max<uint64_t>(hash, 1);
}

}  // namespace

std::string refuse_nccl(const Group& group, const std::vector<NcclSetup::Offer>& offers) {
  const auto name = [&](int member) { return "rank " + std::to_string(group.rank(member)); };
  std::map<std::tuple<uint64_t, int, std::string>, int> gpus;  // by host, to NCCL or else to us, and bus id: a member
  for (int member = 0; member < group.size(); ++member) {
    const NcclSetup::Offer& offer = offers[size_t(member)];
    if (offer.version == 0) return name(member) + ": " + text_in(offer.why);
    if (offer.version != offers[0].version)
      return name(0) + " has version " + nccl_version_text(offers[0].version) + " and " + name(member) + " has " +
             nccl_version_text(offer.version);
    const std::string bus_id = text_in(offer.bus_id);
    const auto [other, is_first] =
        gpus.try_emplace({offer.host, offer.host == 0 ? group.host_of(member) : 0, bus_id}, member);
    if (!is_first) return name(other->second) + " and " + name(member) + " have the same GPU (" + bus_id + ")";
  }
  return "";
}

bool are_even(const Hosts& nodes) {
  const size_t members = nodes[0].size();
  return nodes.size() > 1 && members > 1 &&
         std::ranges::all_of(nodes, [&](const auto& node) { return node.size() == members; });
}

NcclSetup::NcclSetup(const Config& config, const Group& group, const Selector& selector, Hosts nodes, int device)
    : config_(config),
      group_(group),
      selector_(selector),
      nodes_(std::move(nodes)),
      device_(device),
      own_offer_{own_offer()} {
  gather(own_offer_, offers_);
}

NcclSetup::Offer NcclSetup::own_offer() {
  Offer offer;
  try {
    if (!config_.nccl) throw Error(Code::invalid_argument, "LIGHTCC_NCCL is 0");
    const CudaFunctions& functions = cuda(config_.cuda_library);
    check_cuda(functions.bus_id(device_, offer.bus_id.data(), offer.bus_id.size()), "asking where it is", device_);
    check_cuda(functions.load_kernels(device_), "loading kernels", device_);
    nccl(config_.nccl_library).GetVersion(&offer.version);
    if (!config_.nccl_host_id.empty()) offer.host = hash_of(config_.nccl_host_id);
    offer.hierarchical = config_.hierarchical && config_.nccl_2d;
  } catch (const Error& error) {
    set_text(offer.why, error.what());
  }
  return offer;
}

template <class Item> void NcclSetup::gather(const std::vector<Item>& own, std::vector<Item>& all) {
  const size_t members = size_t(group_.size());
  all.resize(members * own.size());
  Collective c{};
  c.kind = Kind::allgather;
  c.index = group_.index();
  c.size = group_.size();
  c.input = own.data();
  c.output = all.data();
  c.counts.assign(members, int64_t(own.size() * sizeof(Item)));
  const Row& row = selector_.choose(c);
  work_ = row.backend->start(c, row.algorithm);
}

bool NcclSetup::step() {
  if (stage_ == Stage::connecting) return connect();
  if (work_ && !work_->done() && !work_->step()) return false;
  if (!work_ || !work_->done()) return true;
  work_.reset();
  if (stage_ == Stage::offers)
    decide();
  else
    stage_ = Stage::connecting;
  return true;
}

void NcclSetup::decide() {
  const std::string refused = refuse_nccl(group_, offers_);
  const bool is_2d = are_even(nodes_) && std::ranges::all_of(offers_, [](const Offer& offer) {
    return offer.hierarchical != 0;
  });
  const int streams = is_2d ? 1 : config_.nccl_streams;  // 2D has two, and a batch's copies are on the first
  if (group_.index() == 0)
    log(Level::info, !refused.empty()
                         ? "tensors of GPUs: through host memory, since NCCL cannot be used: " + refused
                         : "tensors of GPUs: by NCCL " + nccl_version_text(offers_[0].version) +
                               (is_2d ? ", 2D for large all-reduces" : "") +
                               (streams > 1 ? ", on " + std::to_string(streams) + " streams" : ""));
  if (!refused.empty()) {
    stage_ = Stage::done;
    return;
  }
  communicators_ = std::make_unique<NcclCommunicators>();
  plan_all(size_t(streams));
  if (is_2d) plan_2d();
  make_ids();
  stage_ = Stage::ids;
}

void NcclSetup::plan_all(size_t streams) {
  std::vector<int> members(offers_.size());
  std::iota(members.begin(), members.end(), 0);
  communicators_->all.resize(streams);
  for (auto& place : communicators_->all) planned_.push_back({members, &place});
}

// Those of this member's node, and those that have its place on their node.
void NcclSetup::plan_2d() {
  const auto has_own = [&](const auto& members) { return std::ranges::count(members, group_.index()) > 0; };
  const auto& node = *std::ranges::find_if(nodes_, has_own);
  const auto place = std::ranges::find(node, group_.index()) - node.begin();
  Planned cross{{}, &communicators_->cross};
  for (const auto& other : nodes_) cross.members.push_back(other[size_t(place)]);
  planned_.push_back({node, &communicators_->local});
  planned_.push_back(std::move(cross));
}

void NcclSetup::make_ids() {
  const NcclFunctions& functions = nccl(config_.nccl_library);
  own_ids_.resize(planned_.size());
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (planned_[i].members[0] != group_.index()) continue;
    if (const int status = functions.GetUniqueId(&own_ids_[i]); status != kNcclSuccess)
      throw Error(Code::internal, std::string("NCCL made no id for a communicator: ") +
                                      functions.GetErrorString(status) + " (" + functions.GetLastError(nullptr) + ")");
  }
  gather(own_ids_, ids_);
}

// All members make theirs in the same order, one after the other.
bool NcclSetup::connect_next() {
  if (begun_ > 0 && !(*planned_[begun_ - 1].place)->ready()) return false;
  if (begun_ == planned_.size()) {
    stage_ = Stage::done;
    return true;
  }
  const auto& [members, place] = planned_[begun_];
  const auto own = std::ranges::find(members, group_.index()) - members.begin();
  *place = std::make_unique<NcclCommunicator>(
      cuda(config_.cuda_library), nccl(config_.nccl_library), device_, int(members.size()), int(own),
      ids_[size_t(members[0]) * planned_.size() + begun_]);
  ++begun_;
  return true;
}

bool NcclSetup::connect() {
  try {
    return connect_next();
  } catch (const PeerSuspected& error) {
    throw PeerSuspected(error.code(), error.what() + kWithoutNccl);
  } catch (const Error& error) {
    throw Error(error.code(), error.what() + kWithoutNccl);
  }
}

}  // namespace lightcc
