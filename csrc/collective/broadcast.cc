#include "collective/broadcast.h"

#include <algorithm>

#include "collective/blocks.h"

namespace lightcc {
namespace {

constexpr int64_t kPieceElements = 64 << 10, kMostPieces = 64;
int pieces_of(const Collective& c) { return int(std::clamp<int64_t>(c.count / kPieceElements, 1, kMostPieces)); }

// Whom one hears from and whom one tells: the one with most below it first.
struct Branch {
  int parent = -1;
  std::vector<int> children;
};

// A binomial tree of `size`, counted from its root: r hears from r without its lowest bit.
Branch binomial(int r, int size) {
  Branch branch;
  int bit = 1;
  for (; bit < size && !(r & bit); bit *= 2)
    if (r + bit < size) branch.children.insert(branch.children.begin(), r + bit);
  if (r != 0) branch.parent = r - bit;
  return branch;
}

Branch chain(int r, int size) {
  return {r - 1, r + 1 < size ? std::vector<int>{r + 1} : std::vector<int>{}};
}

// Long data go down in pieces, each passed on while the next one arrives.
Schedule pass_down(const Collective& c, const Branch& branch) {
  const bool is_root = branch.parent < 0;
  const int pieces = pieces_of(c), lag = is_root ? 0 : 1;
  const Blocks blocks(c.count, pieces);
  Schedule rounds;
  for (int r = 0; r < pieces + lag; ++r) {
    std::vector<Step> round;
    const int in = r, out = r - lag;
    if (!is_root && in < pieces)
      round.push_back(Step::recv(branch.parent, {Memory::output, blocks.offset(in)}, blocks.count(in)));
    if (out >= 0)
      for (int child : branch.children)
        round.push_back(Step::send(child, {Memory::output, blocks.offset(out)}, blocks.count(out)));
    rounds.push_back(std::move(round));
  }
  return rounds;
}

int place_in(const std::vector<int>& members, int member) {
  return int(std::find(members.begin(), members.end(), member) - members.begin());
}

}  // namespace

Schedule broadcast_binomial(const Collective& c, const Hosts&) {
  const auto member = [&](int r) { return (r + c.root) % c.size; };
  Branch branch = binomial((c.index - c.root + c.size) % c.size, c.size);
  if (branch.parent >= 0) branch.parent = member(branch.parent);
  for (int& child : branch.children) child = member(child);
  return pass_down(c, branch);
}

// The root and the first members of the other hosts are a tree between hosts, and each is the root of a binomial tree
// on its own. Where there are as many pieces as hosts, the tree between hosts is a chain: its way is longer, but no
// host sends more than once what it has heard.
Schedule broadcast_by_host(const Collective& c, const Hosts& hosts) {
  const int count = int(hosts.size());
  int own = 0, first = 0;
  for (int host = 0; host < count; ++host)
    for (int member : hosts[size_t(host)]) {
      if (member == c.index) own = host;
      if (member == c.root) first = host;
    }
  const auto leader = [&](int host) { return host == first ? c.root : hosts[size_t(host)][0]; };
  const auto& here = hosts[size_t(own)];
  const int size = int(here.size()), leads = place_in(here, leader(own));
  const auto member = [&](int r) { return here[size_t((r + leads) % size)]; };

  const Branch inside = binomial((place_in(here, c.index) - leads + size) % size, size);
  Branch branch;
  if (inside.parent >= 0) {
    branch.parent = member(inside.parent);
  } else {
    const int r = (own - first + count) % count;
    const Branch between = pieces_of(c) >= count ? chain(r, count) : binomial(r, count);
    if (between.parent >= 0) branch.parent = leader((between.parent + first) % count);
    for (int child : between.children) branch.children.push_back(leader((child + first) % count));
  }
  for (int child : inside.children) branch.children.push_back(member(child));
  return pass_down(c, branch);
}

}  // namespace lightcc
