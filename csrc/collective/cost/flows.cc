#include "collective/cost/flows.h"

#include <algorithm>
#include <limits>
#include <span>

namespace lightcc {
namespace {

constexpr double kRounding = 1 + 1e-9;

std::span<const Resources::Use> uses_of(const NetworkFlow& flow) { return {flow.path.uses, size_t(flow.path.count)}; }

}  // namespace

void FairSharing::begin(const std::vector<NetworkFlow*>& flows) {
  for (int resource : used_) of_resource_[size_t(resource)] = {};
  used_.clear();
  for (const NetworkFlow* flow : flows)
    for (const auto& [resource, weight] : uses_of(*flow)) {
      OfResource& one = of_resource_[size_t(resource)];
      if (!one.used) {
        one = {bytes_per_s_[size_t(resource)], 0, true};
        used_.push_back(resource);
      }
      one.weight += weight;
    }
}

double FairSharing::most_for_all(const std::vector<NetworkFlow*>& flows) const {
  double most = std::numeric_limits<double>::infinity();
  for (int resource : used_)
    if (const OfResource& one = of_resource_[size_t(resource)]; one.weight > 0)
      most = std::min(most, std::max(0.0, one.left) / one.weight);
  for (const NetworkFlow* flow : flows) most = std::min(most, flow->path.most_bytes_per_s);
  return most;
}

void FairSharing::share(std::vector<NetworkFlow*>& flows) {
  begin(flows);
  growing_ = flows;
  while (!growing_.empty()) {
    const double rate = most_for_all(growing_) * kRounding;
    const auto is_full = [&](const Resources::Use& use) {
      const OfResource& one = of_resource_[size_t(use.resource)];
      return one.left <= rate * one.weight;
    };
    // All are looked at before any is settled, since a settled one takes its share from its resources.
    const auto grows = [&](const NetworkFlow* flow) {
      const auto uses = uses_of(*flow);
      return flow->path.most_bytes_per_s > rate && std::none_of(uses.begin(), uses.end(), is_full);
    };
    const auto settled = std::stable_partition(growing_.begin(), growing_.end(), grows);
    for (auto flow = settled; flow != growing_.end(); ++flow) {
      (*flow)->bytes_per_s = rate;
      for (const auto& [resource, weight] : uses_of(**flow)) {
        OfResource& one = of_resource_[size_t(resource)];
        one.left -= rate * weight;
        one.weight -= weight;
      }
    }
    growing_.erase(settled, growing_.end());
  }
}

}  // namespace lightcc
