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

NcclSetup::NcclSetup(const Config& config, const Group& group, const Selector& selector, Hosts nodes, int device)
    : config_(config),
      group_(group),
      nodes_(std::move(nodes)),
      device_(device),
      own_offer_(own_offer()),
      offers_(size_t(group.size())),
      gather_(start_gather(group, selector, &own_offer_, sizeof own_offer_, offers_.data())),
      connections_(config, group, selector, device) {}

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

bool NcclSetup::step() {
  if (communicators_) return connections_.step();
  if (!gather_->done() && !gather_->step()) return false;
  if (gather_->done()) decide();
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
  is_refused_ = !refused.empty();
  if (is_refused_) return;
  communicators_ = std::make_unique<NcclCommunicators>();
  std::vector<int> members(offers_.size());
  std::iota(members.begin(), members.end(), 0);
  communicators_->all.resize(size_t(streams));
  for (auto& place : communicators_->all) connections_.plan(members, &place);
  if (is_2d) connections_.plan_2d(nodes_, *communicators_);
}

}  // namespace lightcc
