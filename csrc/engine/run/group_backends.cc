#include "engine/run/group_backends.h"

#include <algorithm>
#include <utility>

#include "collective/hierarchical.h"
#include "collective/links.h"
#include "engine/run/nccl_codec_run.h"

namespace lightcc {

template <class Kind> Kind* GroupBackends::add(std::unique_ptr<Kind> backend) {
  Kind* const added = backend.get();
  backends_.push_back(std::move(backend));
  return added;
}

GroupBackends::GroupBackends(Peers& peers, const Group& group, const Config& config)
    : config_(config), nodes_(nodes_of(group, config.intra_size)) {
  std::vector<Link*> links;
  for (int member = 0; member < group.size(); ++member) {
    const bool other = member != group.index();
    links_.push_back(other ? peers.data_link(group.id(), 0, group.rank(member)) : nullptr);
    links.push_back(links_.back().get());
  }
  if (group.on_one_host())
    shared_ = add(std::make_unique<SharedBackend>(peers.local_ranks(), group.id(), 0, group.local_indices(), links));
  const bool several_nodes = nodes_.size() > 1;
  if (several_nodes) {
    const auto node_links = std::make_shared<NodeLinks>(peers, group, nodes_);
    compressed_ = add(std::make_unique<CompressedBackend>(node_links));
    if (config.hierarchical)
      add(std::make_unique<HierarchicalBackend>(
          node_links, HierarchicalBackend::Limits{.least_bytes = config.hierarchical_bytes}));
  }
  add(std::make_unique<LinksBackend>(links, nodes_));
  if (several_nodes) {
    NcclHierarchicalBackend::Limits limits;
    limits.least_bytes = std::max(limits.least_bytes, config.hierarchical_bytes);
    nccl_2d_ = add(std::make_unique<NcclHierarchicalBackend>(limits));
  }
  if (are_even(nodes_)) nccl_codec_ = add(std::make_unique<NcclCodecRun>(*compressed_, nodes_, selector_));
  nccl_ = add(std::make_unique<NcclBackend>());
  use_rules({});
}

void GroupBackends::use_rules(std::span<const Rule> allreduces) {
  std::vector<Backend*> backends;
  for (auto& backend : backends_) backends.push_back(backend.get());
  selector_ = Selector(backends, int(nodes_.size()), config_.select,
                       rules_for(nodes_, config_.hierarchical_allgather, allreduces));
}

}  // namespace lightcc
