// Finds for what one side of a link does what the other does: the n-th of ours under a tag belongs to the n-th of
// theirs under it. Both sides see each one's order, so both come to the same pairs, and need not tell each other. A
// value.
#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

namespace lightcc {

struct MessageTag {
  int32_t space = 0;  // 0: the program's; another: a communicator's of JAX
  int32_t tag = 0;
  auto operator<=>(const MessageTag&) const = default;
};

template <class Ours, class Theirs> class TagMatching {
 public:
  // This side's next one: what it belongs to, if that has come; else it waits.
  std::optional<Theirs> add_ours(MessageTag tag, Ours ours) { return pair(tag, std::move(ours), ours_, theirs_); }
  std::optional<Ours> add_theirs(MessageTag tag, Theirs theirs) { return pair(tag, std::move(theirs), theirs_, ours_); }
  // What the next of theirs belongs to, if it waits; from now on it does not.
  std::optional<Ours> take_ours(MessageTag tag) { return take(ours_, tag); }
  bool any_of_theirs_waits() const { return !theirs_.empty(); }
  void clear() { ours_.clear(), theirs_.clear(); }

 private:
  template <class T> using Waiting = std::multimap<MessageTag, T>;  // of one tag: in their order

  template <class T> static std::optional<T> take(Waiting<T>& waiting, MessageTag tag) {
    const auto first = waiting.lower_bound(tag);
    if (first == waiting.end() || first->first != tag) return std::nullopt;
    std::optional<T> one(std::move(first->second));
    waiting.erase(first);
    return one;
  }
  template <class One, class Other>
  static std::optional<Other> pair(MessageTag tag, One one, Waiting<One>& its_own, Waiting<Other>& others) {
    std::optional<Other> other = take(others, tag);
    if (!other) its_own.emplace(tag, std::move(one));
    return other;
  }

  Waiting<Ours> ours_;
  Waiting<Theirs> theirs_;
};

}  // namespace lightcc
