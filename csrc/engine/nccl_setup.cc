#include "engine/nccl_setup.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/log.h"

namespace lightcc {
namespace {

template <size_t N> void set_text(std::array<char, N>& to, const std::string& text) {
  to.fill(0);
  text.copy(to.data(), N - 1);
}

template <size_t N> std::string text_of(const std::array<char, N>& from) {
  return {from.begin(), std::ranges::find(from, 0)};
}

}  // namespace

std::string refuse_nccl(const Group& group, const std::vector<NcclSetup::Offer>& offers) {
  const auto name = [&](int member) { return "rank " + std::to_string(group.rank(member)); };
  std::map<std::pair<int, std::string>, int> gpus;  // by host and bus id: a member
  for (int member = 0; member < group.size(); ++member) {
    const NcclSetup::Offer& offer = offers[size_t(member)];
    if (offer.version == 0) return name(member) + ": " + text_of(offer.why);
    if (offer.version != offers[0].version)
      return name(0) + " has version " + nccl_version_text(offers[0].version) + " and " + name(member) + " has " +
             nccl_version_text(offer.version);
    const std::string bus_id = text_of(offer.bus_id);
    const auto [other, is_first] = gpus.try_emplace({group.host_of(member), bus_id}, member);
    if (!is_first) return name(other->second) + " and " + name(member) + " have the same GPU (" + bus_id + ")";
  }
  return "";
}

NcclSetup::NcclSetup(const Config& config, const Group& group, const Selector& selector, int device)
    : config_(config), group_(group), selector_(selector), device_(device), own_(own_offer()) {
  offers_.resize(size_t(group.size()));
  Collective c{};
  c.kind = Kind::allgather;
  c.input = &own_;
  c.output = offers_.data();
  c.counts.assign(offers_.size(), sizeof(Offer));
  exchange(std::move(c));
}

NcclSetup::~NcclSetup() {
  if (communicator_) communicator_->abort();
}

NcclSetup::Offer NcclSetup::own_offer() {
  Offer offer;
  try {
    if (!config_.nccl) throw Error(Code::invalid_argument, "LIGHTCC_NCCL is not set");
    const CudaFunctions& functions = cuda(config_.cuda_library);
    check_cuda(functions.bus_id(device_, offer.bus_id.data(), offer.bus_id.size()), "asking where it is", device_);
    nccl(config_.nccl_library).GetVersion(&offer.version);
  } catch (const Error& error) {
    set_text(offer.why, error.what());
  }
  return offer;
}

void NcclSetup::exchange(Collective c) {
  c.index = group_.index();
  c.size = group_.size();
  const Row& row = selector_.choose(c);
  work_ = row.backend->start(c, row.algorithm);
}

bool NcclSetup::step() {
  if (stage_ == Stage::connecting) {
    if (!communicator_->ready()) return false;
    stage_ = Stage::done;
    return true;
  }
  if (work_ && !work_->done() && !work_->step()) return false;
  if (!work_ || !work_->done()) return true;
  work_.reset();
  if (stage_ == Stage::offers)
    decide();
  else
    connect();
  return true;
}

void NcclSetup::decide() {
  const std::string refused = refuse_nccl(group_, offers_);
  if (group_.index() == 0)
    log(Level::info, refused.empty()
                         ? "tensors of GPUs: by NCCL " + nccl_version_text(offers_[0].version)
                         : "tensors of GPUs: through host memory, since NCCL cannot be used: " + refused);
  if (!refused.empty()) {
    stage_ = Stage::done;
    return;
  }
  stage_ = Stage::id;
  if (group_.index() == 0) {
    const NcclFunctions& functions = nccl(config_.nccl_library);
    if (const int status = functions.GetUniqueId(&id_); status != kNcclSuccess)
      throw Error(Code::internal, std::string("NCCL made no id for a communicator: ") +
                                      functions.GetErrorString(status) + " (" + functions.GetLastError(nullptr) + ")");
  }
  Collective c{};
  c.kind = Kind::broadcast;
  c.output = &id_;
  c.count = sizeof id_;
  exchange(std::move(c));
}

void NcclSetup::connect() {
  communicator_ = std::make_unique<NcclCommunicator>(cuda(config_.cuda_library), nccl(config_.nccl_library), device_,
                                                     group_.size(), group_.index(), id_);
  stage_ = Stage::connecting;
}

}  // namespace lightcc
