// Links to ranks of other hosts over a network plugin of NCCL's, whichever it is: two communicators for each
// (peer, group, lane), made when it is first used.
//
// Another transport stands below, with a link of its own for each of these. It brings the handles by which the plugin
// connects, so a process that does not know the job's secret gets none; and it tells of ends, causes and deaths, of
// which a plugin knows little. A rank says there its handle; when the plugin has sent all, how many frames that were;
// and when as many as the peer has said have come, that they have. Only then the peer closes. It is no loss when the
// plugin's connection ends afterwards; where it fails before, the peer is lost, unless the transport below tells in a
// while what happened.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "net/link_table.h"
#include "net/plugin/plugin_link.h"
#include "net/transport.h"

namespace lightcc {

struct PluginTimeouts {
  uint64_t connect_ns = 30'000'000'000;  // from the peer's handle on, for both communicators
  uint64_t verdict_ns = 2'000'000'000;   // for the transport below to tell why a connection has failed
};

class PluginTransport : public Transport {
 public:
  // names: of the peers, by world rank.
  PluginTransport(std::unique_ptr<PluginDevice>, int rank, std::vector<std::string> names,
                  std::unique_ptr<Transport> below, PluginTimeouts = {});
  ~PluginTransport() override;

  std::unique_ptr<Link> link(int group, int lane, int peer) override;
  bool step() override;
  void flush() override;
  uint64_t sent_bytes() const override { return sent_bytes_.load(std::memory_order_relaxed); }
  void probe(int peer) override { below_->probe(peer); }
  void mark_left(int peer) override;

  int descriptor() const override { return below_->descriptor(); }
  uint64_t arm() override;  // plugins have no descriptor to sleep on: one looks again in a while
  bool busy() const override { return under_way_ > 0 || below_->busy(); }

  bool finish() override;
  void retire(int group) override;
  void end(const Error& cause) override;
  void close() override;
  void close_in_child() override;

 private:
  struct OpenLink;
  class PluginLink;

  OpenLink& link_state(const LinkKey&);
  void open(OpenLink&);
  void hear(const LinkKey&, OpenLink&);
  bool step(const LinkKey&, OpenLink&, bool hears);
  static bool has_all(const OpenLink&);
  bool in_peace(const LinkKey&, const OpenLink&) const;
  void judge(const LinkKey&, OpenLink&) const;
  bool finish(OpenLink&);
  void forget_retired();

  std::unique_ptr<PluginDevice> device_;
  const std::vector<std::string> names_;
  std::unique_ptr<Transport> below_;
  const PluginTimeouts timeouts_;
  LinkTable<OpenLink> links_;
  std::vector<OpenLink*> dirty_;
  std::map<int, uint64_t> retiring_;  // groups whose links are gone at this end, and since when
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<int> under_way_{0};  // links that connect, or have records that are not sent yet
  std::atomic<uint64_t> moved_ns_{0};
  uint64_t now_ns_ = 0, below_ns_ = 0;
};

}  // namespace lightcc
