#include "collective/by_host.h"

#include <algorithm>

#include "collective/blocks.h"

namespace lightcc {
namespace {

// The size of a piece of a rank's block. Pieces hide the time that the last one takes inside a host, and scratch holds
// two pieces of what comes from each host. More rounds than these would only make the plan longer.
constexpr int64_t kPiece = 64 << 10;  // elements
constexpr int kMostRounds = 512;
// Up to so many bytes in all, start-ups count: so many hosts are served in one round.
constexpr int64_t kBurstBytes = 256 << 10;
constexpr int kBurstHosts = 8;

// The blocks of all members, each cut into as many pieces.
class BlockPieces {
 public:
  BlockPieces(const Collective& c, const Hosts& hosts) : blocks_(c.counts), counts_(c.counts) {
    const int64_t longest = *std::max_element(c.counts.begin(), c.counts.end());
    const int most = std::max(1, kMostRounds / int(hosts.size()));
    number_ = int(std::clamp<int64_t>(longest / kPiece, 1, most));
    burst_ = number_ == 1 && blocks_.total() * int64_t(size_of(c.dtype)) <= kBurstBytes;
  }
  int number() const { return number_; }
  bool burst() const { return burst_; }
  // Where a piece of a member's block begins: among all blocks, and in the block itself.
  int64_t offset(int member, int piece) const { return blocks_.offset(member) + begin(member, piece); }
  int64_t begin(int member, int piece) const {
    const int64_t count = counts_[size_t(member)];
    return count / number_ * piece + count % number_ * piece / number_;
  }
  int64_t count(int member, int piece) const { return begin(member, piece + 1) - begin(member, piece); }

 private:
  Blocks blocks_;
  const std::vector<int64_t>& counts_;
  int number_;
  bool burst_;
};

// The hosts as one member sees them, by their distance from its own.
class View {
 public:
  View(const Collective& c, const Hosts& hosts) : index_(c.index), hosts_(hosts), seats_(size_t(c.size)) {
    for (size_t host = 0; host < hosts.size(); ++host)
      for (size_t place = 0; place < hosts[host].size(); ++place)
        seats_[size_t(hosts[host][place])] = {int(host), int(place)};
  }
  int hosts() const { return int(hosts_.size()); }
  int host() const { return seats_[size_t(index_)].host; }
  int right(int distance) const { return (host() + distance) % hosts(); }
  int left(int distance) const { return (host() - distance % hosts() + hosts()) % hosts(); }
  const std::vector<int>& members(int host) const { return hosts_[size_t(host)]; }
  std::vector<int> neighbours() const {  // the others here
    std::vector<int> others;
    for (int member : members(host()))
      if (member != index_) others.push_back(member);
    return others;
  }
  // On hosts with more members than the member's own has, different hosts' counterparts begin at different places.
  int counterpart(int member, int host) const {
    const auto& there = members(host);
    const Seat& seat = seats_[size_t(member)];
    return there[(size_t(seat.place) * there.size() / members(seat.host).size() + size_t(seat.host)) % there.size()];
  }
  // The members of a host whose counterpart here is `member`.
  std::vector<int> served_by(int member, int host) const {
    std::vector<int> served;
    for (int other : members(host))
      if (counterpart(other, this->host()) == member) served.push_back(other);
    return served;
  }

 private:
  struct Seat { int host, place; };
  const int index_;
  const Hosts& hosts_;
  std::vector<Seat> seats_;
};

// What sets out in one round: a piece, between hosts at the distances [begin, end).
struct Wave { int piece, begin, end; };

}  // namespace

// Round by round a wave goes between hosts, and the one before is handed on inside: at first everyone's own block.
Schedule allgather_by_host(const Collective& c, const Hosts& hosts) {
  const View view(c, hosts);
  const BlockPieces pieces(c, hosts);
  const std::vector<int> neighbours = view.neighbours();
  std::vector<Wave> waves;
  const int stride = pieces.burst() ? kBurstHosts : 1;
  for (int distance = 1; distance < view.hosts(); distance += stride)
    for (int piece = 0; piece < pieces.number(); ++piece)
      waves.push_back({piece, distance, std::min(distance + stride, view.hosts())});

  const auto own = [&](int piece) { return Place{Memory::input, pieces.begin(c.index, piece)}; };
  const auto place = [&](int member, int piece) { return Place{Memory::output, pieces.offset(member, piece)}; };
  Schedule rounds;
  for (int r = 0; r < std::max(pieces.number(), int(waves.size()) + 1); ++r) {
    std::vector<Step> round;
    if (r < int(waves.size())) {
      const Wave& wave = waves[size_t(r)];
      for (int distance = wave.begin; distance < wave.end; ++distance) {
        const int to = view.counterpart(c.index, view.right(distance));
        round.push_back(Step::send(to, own(wave.piece), pieces.count(c.index, wave.piece)));
        for (int from : view.served_by(c.index, view.left(distance)))
          round.push_back(Step::recv(from, place(from, wave.piece), pieces.count(from, wave.piece)));
      }
    }
    if (r < pieces.number()) {
      for (int other : neighbours) {
        round.push_back(Step::send(other, own(r), pieces.count(c.index, r)));
        round.push_back(Step::recv(other, place(other, r), pieces.count(other, r)));
      }
      round.push_back(Step::copy(own(r), place(c.index, r), pieces.count(c.index, r)));
    }
    if (r > 0 && r <= int(waves.size())) {
      const Wave& wave = waves[size_t(r - 1)];
      for (int distance = wave.begin; distance < wave.end; ++distance)
        for (int other : neighbours) {
          for (int member : view.served_by(c.index, view.left(distance)))
            round.push_back(Step::send(other, place(member, wave.piece), pieces.count(member, wave.piece)));
          for (int member : view.served_by(other, view.left(distance)))
            round.push_back(Step::recv(other, place(member, wave.piece), pieces.count(member, wave.piece)));
        }
    }
    rounds.push_back(std::move(round));
  }
  return rounds;
}

// A wave takes three rounds: inputs of a host to the counterparts of the blocks' owners, where they are added up, and
// one sum to each owner. At the distance of all hosts, the own one, inputs go straight to their owner. Whoever adds up
// has all that it needs side by side in scratch: so 16-bit floats are rounded once a host and once more.
Schedule reducescatter_by_host(const Collective& c, const Hosts& hosts) {
  const View view(c, hosts);
  const BlockPieces pieces(c, hosts);
  const std::vector<int> neighbours = view.neighbours();
  const int others = int(neighbours.size()), slots = others + view.hosts() - 1;
  std::vector<Wave> waves;
  const int stride = pieces.burst() ? view.hosts() > kBurstHosts ? kBurstHosts : view.hosts() : 1;
  for (int piece = 0; piece < pieces.number(); ++piece)
    for (int distance = 1; distance <= view.hosts(); distance += stride)
      waves.push_back({piece, distance, std::min(distance + stride, view.hosts() + 1)});

  // What is added up here for others: by wave, the blocks and where their sums lie in the wave's memory.
  struct PartialSum { int owner; int64_t offset, count; };
  std::vector<std::vector<PartialSum>> sums;
  int64_t sums_count = 0;
  for (const Wave& wave : waves) {
    auto& of_wave = sums.emplace_back();
    int64_t offset = 0;
    for (int distance = wave.begin; distance < std::min(wave.end, view.hosts()); ++distance)
      for (int owner : view.served_by(c.index, view.right(distance))) {
        of_wave.push_back({owner, offset, pieces.count(owner, wave.piece)});
        offset += of_wave.back().count;
      }
    sums_count = std::max(sums_count, offset);
  }
  // Scratch: two waves' inputs of the others here, two waves' sums, and two pieces' worth of what the own block is
  // added up from: the others' inputs, then the other hosts' sums by distance.
  int64_t own_count = 0;
  for (int piece = 0; piece < pieces.number(); ++piece) own_count = std::max(own_count, pieces.count(c.index, piece));
  const auto inputs_at = [&](size_t wave, const PartialSum& sum, int other) {
    return Place{Memory::scratch, int64_t(wave % 2) * others * sums_count + others * sum.offset + other * sum.count};
  };
  const auto sum_at = [&](size_t wave, const PartialSum& sum) {
    if (others == 0) return Place{Memory::input, pieces.offset(sum.owner, waves[wave].piece)};
    return Place{Memory::scratch, (2 * others + int64_t(wave % 2)) * sums_count + sum.offset};
  };
  const auto slot_at = [&](int piece, int slot) {
    return Place{Memory::scratch, 2 * (others + 1) * sums_count + piece % 2 * slots * own_count +
                                      slot * pieces.count(c.index, piece)};
  };
  const auto input_at = [&](int owner, int piece) { return Place{Memory::input, pieces.offset(owner, piece)}; };

  const int waves_of_piece = int(waves.size()) / pieces.number(), lag = view.hosts() == 1 ? 1 : 3;
  Schedule rounds;
  for (size_t r = 0; r < waves.size() + size_t(lag); ++r) {
    std::vector<Step> round;
    if (r >= 2 && r - 2 < waves.size()) {
      const Wave& wave = waves[r - 2];
      for (const PartialSum& sum : sums[r - 2]) round.push_back(Step::send(sum.owner, sum_at(r - 2, sum), sum.count));
      for (int distance = wave.begin; distance < std::min(wave.end, view.hosts()); ++distance)
        round.push_back(Step::recv(view.counterpart(c.index, view.left(distance)),
                                   slot_at(wave.piece, others + distance - 1), pieces.count(c.index, wave.piece)));
    }
    if (r < waves.size()) {
      const Wave& wave = waves[r];
      for (int distance = wave.begin; distance < std::min(wave.end, view.hosts()); ++distance)
        for (int owner : view.members(view.right(distance)))
          if (const int to = view.counterpart(owner, view.host()); to != c.index)
            round.push_back(Step::send(to, input_at(owner, wave.piece), pieces.count(owner, wave.piece)));
      for (const PartialSum& sum : sums[r])
        for (int i = 0; i < others; ++i)
          round.push_back(Step::recv(neighbours[size_t(i)], inputs_at(r, sum, i), sum.count));
      for (int i = 0; i < others && wave.end > view.hosts(); ++i) {
        const int other = neighbours[size_t(i)];
        round.push_back(Step::send(other, input_at(other, wave.piece), pieces.count(other, wave.piece)));
        round.push_back(Step::recv(other, slot_at(wave.piece, i), pieces.count(c.index, wave.piece)));
      }
    }
    if (r >= 1 && r - 1 < waves.size() && others > 0)
      for (const PartialSum& sum : sums[r - 1])
        round.push_back(Step::reduce(input_at(sum.owner, waves[r - 1].piece), inputs_at(r - 1, sum, 0), others,
                                     sum_at(r - 1, sum), sum.count, false));
    if (const int passed = int(r) - lag + 1; passed > 0 && passed % waves_of_piece == 0) {
      const int piece = passed / waves_of_piece - 1;
      round.push_back(Step::reduce(input_at(c.index, piece), slot_at(piece, 0), slots,
                                   {Memory::output, pieces.begin(c.index, piece)}, pieces.count(c.index, piece), true));
    }
    rounds.push_back(std::move(round));
  }
  return rounds;
}

}  // namespace lightcc
