// The backends that BackendContract holds for, a row each.
#include "contracts/backend_contract.h"

#include "collective/compressed.h"
#include "collective/hierarchical.h"
#include "collective/links.h"
#include "collective/shared.h"

namespace lightcc {
namespace {

std::unique_ptr<Backend> shared(Peers& peers, const Group& group, const std::vector<Link*>& links) {
  return std::make_unique<SharedBackend>(peers.local_ranks(), group.id(), 0, group.local_indices(), links);
}

std::unique_ptr<Backend> links(Peers&, const Group& group, const std::vector<Link*>& links) {
  return std::make_unique<LinksBackend>(links, group.hosts());
}

std::shared_ptr<NodeLinks> node_links(Peers& peers, const Group& group) {
  return std::make_shared<NodeLinks>(peers, group, nodes_of(group));
}

std::unique_ptr<Backend> hierarchical(Peers& peers, const Group& group, const std::vector<Link*>&) {
  constexpr HierarchicalBackend::Limits kSmallChunks{.one_lane_bytes = 1 << 10, .chunk_bytes = 4 << 10};
  return std::make_unique<HierarchicalBackend>(node_links(peers, group), kSmallChunks);
}

std::unique_ptr<Backend> compressed(Peers& peers, const Group& group, const std::vector<Link*>&) {
  return std::make_unique<CompressedBackend>(node_links(peers, group));
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendContract,
                         testing::Values(BackendCase{"shared", {4}, shared}, BackendCase{"links_on_a_host", {3}, links},
                                         BackendCase{"links", {2, 1, 1}, links},
                                         BackendCase{"two_levels", {2, 2}, hierarchical},
                                         BackendCase{"two_levels_uneven", {1, 3}, hierarchical},
                                         BackendCase{"compressed", {2, 2}, compressed,
                                                     {CodecKind::topk, DType::float32, 0.25, 0}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace lightcc
