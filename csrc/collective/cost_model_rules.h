// The selector's rules for all-reduces between hosts, by what the cost model says of each way on a cluster that was
// measured. As text they travel to all ranks: only one rank makes them, so that all have the same.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collective/cost/cluster.h"
#include "collective/selector.h"

namespace lightcc {

// For each size the best, and behind it the second best. hierarchical: 2D may be chosen. Ways that take up to
// kAlike times as long as the best are alike; of these the first in a fixed order is taken, so that two measurements of
// one network mostly lead to the same rules, and so to the same bits of a sum.
inline constexpr double kAlike = 1.25;
std::vector<Rule> cost_model_rules(const Cluster&, bool hierarchical);

std::string text_of(std::span<const Rule>);                    // "65536 2d/pairwise 65536 links/ring ..."
// Throws Error{internal} if that is no such text.
std::vector<Rule> parse_allreduce_rules(std::string_view);

}  // namespace lightcc
