// How a group engine is made: its links, its backends, and the rules by which they are chosen.
#include <algorithm>
#include <utility>

#include "collective/compressed.h"
#include "collective/hierarchical.h"
#include "engine/group_engine.h"

namespace lightcc {

GroupEngine::GroupEngine(Peers& peers, std::shared_ptr<const Group> group, const Config& config,
                         std::shared_ptr<OutputPool> outputs, std::shared_ptr<PinnedPool> pinned, Counters& counters,
                         Tracing& tracing, const ProgressLock& progress_lock, NcclLaunches& launches,
                         Effects& effects, const Surroundings& surroundings, CacheFile tuned)
    : peers_(peers),
      group_(std::move(group)),
      config_(config),
      outputs_(std::move(outputs)),
      pinned_(std::move(pinned)),
      counters_(counters),
      tracing_(tracing),
      progress_lock_(progress_lock),
      launches_(launches),
      effects_(effects),
      surroundings_(surroundings),
      plans_(group_->index(), response_cache_),
      buffers_{FusionBuffer(peers.arena()), FusionBuffer(peers.arena())},
      joined_rank_(peers.arena()),
      left_(size_t(group_->size())) {
  control_plane_ = std::make_unique<ControlPlane>(peers, *group_);
  std::vector<Link*> links;
  for (int member = 0; member < group_->size(); ++member) {
    const bool other = member != group_->index();
    links_.push_back(other ? peers.data_link(group_->id(), 0, group_->rank(member)) : nullptr);
    links.push_back(links_.back().get());
  }
  if (is_coordinator())
    coordinator_ = std::make_unique<Coordinator>(
        group_->ranks(), Coordinator::Limits{{config.fusion_bytes, config.fusion}, config.cache_capacity});
  if (group_->on_one_host()) {
    auto shared =
        std::make_unique<SharedBackend>(peers.local_ranks(), group_->id(), 0, group_->local_indices(), links);
    shared_ = shared.get();
    backends_.push_back(std::move(shared));
    fast_path_ = std::make_unique<SharedFastPath>(peers.local_ranks(), *group_, *shared_);
  }
  if (!shared_ && group_->size() == 2) {
    auto remote = std::make_unique<RemoteFastPath>(
        *group_, [this](std::string bytes) { control_plane_->send_slot(std::move(bytes)); },
        [this](const Collective& call) {
          const Row& row = selector_.choose(call, autotune_choices_);
          return row.backend->start(call, row.algorithm);
        });
    remote_fast_path_ = remote.get();
    fast_path_ = std::move(remote);
  }
  const Hosts nodes = nodes_of(*group_, config.intra_size);
  if (nodes.size() > 1) {
    const auto node_links = std::make_shared<NodeLinks>(peers, *group_, nodes);
    backends_.push_back(std::make_unique<CompressedBackend>(node_links));
    if (config.hierarchical)
      backends_.push_back(std::make_unique<HierarchicalBackend>(
          node_links, HierarchicalBackend::Limits{.least_bytes = config.hierarchical_bytes}));
  }
  backends_.push_back(std::make_unique<LinksBackend>(links, nodes));
  if (nodes.size() > 1) {
    NcclHierarchicalBackend::Limits limits;
    limits.least_bytes = std::max(limits.least_bytes, config.hierarchical_bytes);
    auto nccl_2d = std::make_unique<NcclHierarchicalBackend>(limits);
    nccl_2d_ = nccl_2d.get();
    backends_.push_back(std::move(nccl_2d));
  }
  auto nccl = std::make_unique<NcclBackend>();
  nccl_ = nccl.get();
  backends_.push_back(std::move(nccl));
  nodes_ = int(nodes.size());
  select({});
  if (config.autotune && is_coordinator() && group_->id() == 0 && nodes_ > 1)
    tuning_ = std::make_unique<Tuning>(config, selector_, group_->size(), std::move(tuned));
}

void GroupEngine::select(std::span<const Rule> allreduces) {
  std::vector<Backend*> backends;
  for (auto& backend : backends_) backends.push_back(backend.get());
  const Hosts nodes = nodes_of(*group_, config_.intra_size);
  selector_ = Selector(backends, nodes_, config_.select, rules_for(nodes, config_.hierarchical_allgather, allreduces));
}

void GroupEngine::use_rules(std::span<const Rule> allreduces, PlanCosts costs) {
  progress_lock_.assert_held();
  select(allreduces);
  if (coordinator_) coordinator_->expect_costs(costs);
  if (tuning_) tuning_->restart();
}

}  // namespace lightcc
