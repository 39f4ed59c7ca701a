// The backends of a group, and the rules by which one of them is chosen for a collective.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "base/config.h"
#include "collective/compressed.h"
#include "collective/nccl_hierarchical.h"
#include "collective/selector.h"
#include "collective/shared.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

class NcclCodecRun;

// Only whoever holds the progress lock calls it.
class GroupBackends {
 public:
  // The arguments outlive it.
  GroupBackends(Peers&, const Group&, const Config&);

  const Selector& selector() const { return selector_; }
  void use_rules(std::span<const Rule> allreduces);  // they go before others of all-reduces
  const Hosts& nodes() const { return nodes_; }      // hosts, or parts of one, as backends see them
  SharedBackend* shared() const { return shared_; }  // nullptr: not all members share this host
  CompressedBackend* compressed() const { return compressed_; }  // nullptr: there is one node only
  // These run nothing until they are connected (nccl_run.h).
  NcclBackend& nccl() const { return *nccl_; }
  NcclHierarchicalBackend* nccl_2d() const { return nccl_2d_; }  // nullptr: there is one node only
  NcclCodecRun* nccl_codec() const { return nccl_codec_; }  // nullptr: nodes have one member, or not equally many

 private:
  // Keeps a backend, and returns it.
  template <class Kind> Kind* add(std::unique_ptr<Kind>);

  const Config& config_;
  const Hosts nodes_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Backend>> backends_;
  SharedBackend* shared_ = nullptr;
  CompressedBackend* compressed_ = nullptr;
  NcclBackend* nccl_ = nullptr;
  NcclHierarchicalBackend* nccl_2d_ = nullptr;
  NcclCodecRun* nccl_codec_ = nullptr;
  Selector selector_;
};

}  // namespace lightcc
