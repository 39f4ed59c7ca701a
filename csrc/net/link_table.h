// What every transport knows of its links: which there are, who connects, which peers have left, which groups are gone
// here, and why the epoch has ended. A link's State, and how its connection comes about, are the transport's own.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <set>
#include <utility>

#include "base/error.h"

namespace lightcc {

struct LinkKey {
  static constexpr int kProbe = -2;  // a lane below all others: whether the peer is there at all
  int group, lane, peer;
  auto operator<=>(const LinkKey&) const = default;
};

template <class State> class LinkTable {
 public:
  using Links = std::map<LinkKey, std::unique_ptr<State>>;
  using Range = std::ranges::subrange<typename Links::iterator>;

  explicit LinkTable(int rank) : rank_(rank) {}
  // Of the two ranks of a link the higher one does.
  bool connects(int peer) const { return rank_ > peer; }

  // A link is made when it is first asked for, by this rank or by its peer; make() returns its state.
  template <class Make> State& get(const LinkKey& key, Make make) {
    if (State* state = find(key)) return *state;
    return *links_.emplace(key, make()).first->second;
  }
  State* find(const LinkKey& key) {
    const auto it = links_.find(key);
    return it == links_.end() ? nullptr : it->second.get();
  }
  auto begin() { return links_.begin(); }
  auto end() { return links_.end(); }
  Range of_group(int group) {
    return {links_.lower_bound({group, LinkKey::kProbe, 0}), links_.lower_bound({group + 1, LinkKey::kProbe, 0})};
  }
  auto erase(typename Links::iterator link) { return links_.erase(link); }
  void erase(Range links) { links_.erase(links.begin(), links.end()); }
  void erase(LinkKey key) { links_.erase(key); }
  void clear() { links_.clear(); }

  void mark_left(int peer) { left_.insert(peer); }      // it has shut down: that it is not there any more is no loss
  bool has_left(int peer) const { return left_.contains(peer); }
  void retire(int group) { retired_.insert(group); }    // a peer's connection for it may still come
  bool is_retired(int group) const { return retired_.contains(group); }

  bool end_epoch(const Error& cause) {                  // false: it had ended, and its first cause stays
    if (ended_) return false;
    ended_ = cause;
    return true;
  }
  const std::optional<Error>& ended() const { return ended_; }

 private:
  const int rank_;
  Links links_;
  std::set<int> left_, retired_;
  std::optional<Error> ended_;
};

}  // namespace lightcc
