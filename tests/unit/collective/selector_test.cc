#include "collective/selector.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

Collective collective(Kind kind, int size, int64_t bytes) {
  Collective c{};
  c.kind = kind;
  c.size = size;
  c.dtype = DType::float32;
  if (kind == Kind::allreduce || kind == Kind::broadcast) c.count = bytes / 4;
  else c.counts.assign(size_t(size), bytes / 4 / size);
  return c;
}
std::string chosen(const Selector& selector, Kind kind, int size, int64_t bytes) {
  return text_of(selector.choose(collective(kind, size, bytes)));
}

// Says what it accepts, and runs nothing.
struct Named : Backend {
  Named(const char* name, bool (*accepts)(const Collective&)) : name_(name), accepts_(accepts) {}
  const char* name() const override { return name_; }
  bool accepts(const Collective& c) const override { return accepts_(c); }
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override { return nullptr; }
  const char* name_;
  bool (*accepts_)(const Collective&);
};
Named shared("shared", [](const Collective& c) { return c.kind != Kind::barrier && !is_adasum(c); });
Named links("links", [](const Collective& c) { return c.kind != Kind::add_group; });

Selector on_one_host(std::string_view forced = "") {
  Backend* const backends[] = {&shared, &links};
  return Selector(backends, 1, forced);
}
Selector on_two_hosts(std::string_view forced = "") {  // of one rank each
  Backend* const backends[] = {&links};
  return Selector(backends, 2, forced, rules_for({{0}, {1}}, true));
}

TEST(Selector, SizeDecidesBetweenHosts) {
  const Selector selector = on_two_hosts();
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, 4), "links/recursive_doubling");
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, 8 << 10), "links/recursive_doubling");
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, (8 << 10) + 4), "links/halving_doubling");
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, 64 << 20), "links/ring");
  EXPECT_EQ(chosen(selector, Kind::allreduce, 100'000, 64 << 20), "links/halving_doubling");
  EXPECT_EQ(chosen(selector, Kind::reducescatter, 4, 1 << 10), "links/pairwise");
  EXPECT_EQ(chosen(selector, Kind::reducescatter, 4, 64 << 20), "links/ring");
  EXPECT_EQ(chosen(selector, Kind::allgather, 4, 1 << 10), "links/bruck");
  EXPECT_EQ(chosen(selector, Kind::allgather, 4, 64 << 20), "links/ring");
  EXPECT_EQ(chosen(selector, Kind::allgather, 100'000, int64_t(1) << 30), "links/bruck");
  EXPECT_EQ(chosen(selector, Kind::broadcast, 4, 64 << 20), "links/binomial");
  EXPECT_EQ(chosen(selector, Kind::alltoall, 4, 64 << 20), "links/pairwise");
  EXPECT_EQ(chosen(selector, Kind::barrier, 4, 0), "links/dissemination");
}

TEST(Selector, HostsOfSeveralGoByHost) {
  Backend* const backends[] = {&links};
  const Selector selector(backends, 2, "", rules_for({{0, 1}, {2}}, true));
  for (const int64_t bytes : {1 << 10, 64 << 20}) {
    EXPECT_EQ(chosen(selector, Kind::reducescatter, 4, bytes), "links/by_host");
    EXPECT_EQ(chosen(selector, Kind::allgather, 4, bytes), "links/by_host");
    EXPECT_EQ(chosen(selector, Kind::broadcast, 4, bytes), "links/by_host");
  }
  EXPECT_EQ(chosen(selector, Kind::allgather, 65, 1 << 10), "links/bruck") << "start-ups";
  EXPECT_EQ(chosen(selector, Kind::allgather, 65, 64 << 20), "links/by_host");
  EXPECT_EQ(chosen(selector, Kind::allgather, 100'000, int64_t(1) << 30), "links/bruck");
  const Selector off(backends, 2, "", rules_for({{0, 1}, {2}}, false));
  EXPECT_EQ(chosen(off, Kind::allgather, 4, 64 << 20), "links/ring");
  EXPECT_EQ(chosen(off, Kind::reducescatter, 4, 64 << 20), "links/by_host");
  const Selector forced(backends, 2, "allgather=by_host,broadcast=binomial", rules_for({{0, 1}, {2}}, false));
  EXPECT_EQ(chosen(forced, Kind::allgather, 4, 4), "links/by_host");
  EXPECT_EQ(chosen(forced, Kind::broadcast, 4, 4), "links/binomial");
}

TEST(Selector, OneHostSharesMemory) {
  const Selector selector = on_one_host();
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, 4), "shared");
  EXPECT_EQ(chosen(selector, Kind::reducescatter, 4, 64 << 20), "shared");
  EXPECT_EQ(chosen(selector, Kind::allgather, 4, 64 << 20), "shared");
  EXPECT_EQ(chosen(selector, Kind::barrier, 4, 0), "links/dissemination") << "when the first cannot";
}

TEST(Selector, AdasumHasItsOwnRows) {
  Collective c = collective(Kind::allreduce, 4, 64 << 20);
  c.op = ReduceOp::adasum;
  const Collective small = [&] { Collective s = c; s.count = 1; return s; }();
  for (bool one_host : {false, true})
    for (const char* forced : {"", "allreduce=ring", "allreduce=shared"}) {
      const Selector selector = one_host ? on_one_host(forced) : on_two_hosts(forced);
      EXPECT_EQ(text_of(selector.choose(c)), "links/adasum_halving");
      EXPECT_EQ(text_of(selector.choose(small)), "links/adasum_whole");
    }
  const Selector forced = on_one_host("allreduce=adasum_whole");
  EXPECT_EQ(text_of(forced.choose(c)), "links/adasum_whole");
  EXPECT_EQ(chosen(forced, Kind::allreduce, 4, 4), "shared") << "a sum is not touched by that";
}

// What alltoall's ranks know differs, so nothing of it may decide.
TEST(Selector, AlltoallIsChosenBlindly) {
  Collective c = collective(Kind::alltoall, 2, 64 << 20);
  c.send = {1, 2};
  EXPECT_EQ(bytes_of(c), 0);
}

TEST(Selector, ForcedRowsGoFirst) {
  const Selector one_host =
      on_one_host(" allreduce=ring, broadcast = binomial,reducescatter=shared,,allgather=links/bruck");
  EXPECT_EQ(chosen(one_host, Kind::allreduce, 4, 4), "links/ring");
  EXPECT_EQ(chosen(one_host, Kind::reducescatter, 4, 4), "shared");
  EXPECT_EQ(chosen(one_host, Kind::allgather, 4, 64 << 20), "links/bruck");
  const Selector hosts = on_two_hosts("reducescatter=shared");
  EXPECT_EQ(chosen(hosts, Kind::reducescatter, 4, 4), "links/pairwise") << "no memory is shared between hosts";
  EXPECT_NE(one_host.text().find("links/ring  (forced)"), std::string::npos) << one_host.text();
}

std::string refusal_of(std::string_view forced) {
  try {
    on_one_host(forced);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "none";
}

// By size, and only where there is another way that gives the same result.
TEST(Selector, TheSecondRowThatFits) {
  Named two_levels("2d", [](const Collective& c) { return c.kind == Kind::allreduce && !is_adasum(c); });
  Named compressed("compressed", [](const Collective& c) { return c.codec.kind != CodecKind::none; });
  Backend* const backends[] = {&compressed, &two_levels, &links};
  const Selector selector(backends, 2, "", rules_for({{0}, {1}}, true));
  const Collective large = collective(Kind::allreduce, 2, 1 << 20);
  const AutotuneChoices only_large = AutotuneChoices(1) << 20;
  EXPECT_EQ(size_class(1 << 20), 20);
  EXPECT_EQ(size_class((1 << 21) - 1), 20);
  EXPECT_EQ(size_class(0), 0);
  EXPECT_EQ(text_of(selector.choose(large)), "2d");
  EXPECT_EQ(text_of(selector.choose(large, only_large)), "links/ring");
  EXPECT_EQ(text_of(selector.choose(collective(Kind::allreduce, 2, 1 << 19), only_large)), "2d");
  Collective other = large;
  other.codec.kind = CodecKind::topk;
  EXPECT_EQ(text_of(selector.choose(other, ~AutotuneChoices())), "compressed");
  other = large;
  other.op = ReduceOp::adasum;
  EXPECT_EQ(text_of(selector.choose(other, ~AutotuneChoices())), "links/adasum_halving");
  EXPECT_EQ(text_of(selector.choose(collective(Kind::broadcast, 2, 1 << 20), ~AutotuneChoices())), "links/binomial");
  const Rule only[] = {{Kind::allreduce, 0, 0, 0, "links", "ring"}, {Kind::allreduce, 0, 0, 0, "links", "ring"}};
  EXPECT_EQ(text_of(Selector(backends, 2, "", only).choose(large, only_large)), "links/ring") << "there is no other";
}

TEST(Selector, TwoLevelsCanBeToldHowToExchange) {
  Named two_levels("2d", [](const Collective&) { return true; });
  Backend* const backends[] = {&two_levels, &links};
  const auto chosen_by = [&](const char* forced) {
    const Selector selector(backends, 2, forced, rules_for({{0}, {1}}, true));
    return text_of(selector.choose(collective(Kind::allreduce, 2, 4)));
  };
  EXPECT_EQ(chosen_by("allreduce=2d"), "2d");
  EXPECT_EQ(chosen_by("allreduce=2d/ring"), "2d/ring");
  EXPECT_THROW(chosen_by("allreduce=2d/adasum_whole"), Error);
  EXPECT_THROW(chosen_by("allreduce=2d/star"), Error);
}

// What a new backend takes: the interface, and its rows.
TEST(Selector, ABackendIsAddedByOneRule) {
  Named fast("fast", [](const Collective& c) { return c.size % 2 == 0; });
  const Rule rules[] = {{Kind::allreduce, 2, 0, 1 << 20, "fast", nullptr}, {Kind::allreduce, 0, 0, 0, "links", "ring"}};
  Backend* const backends[] = {&links, &fast};
  const Selector two_hosts(backends, 2, "", rules), one_host(backends, 1, "", rules);
  const Row& row = two_hosts.choose(collective(Kind::allreduce, 4, 1 << 20));
  EXPECT_EQ(row.backend, &fast);
  EXPECT_EQ(row.algorithm, nullptr);
  EXPECT_EQ(chosen(two_hosts, Kind::allreduce, 4, (1 << 20) + 4), "links/ring") << "beyond its bytes";
  EXPECT_EQ(chosen(two_hosts, Kind::allreduce, 3, 4), "links/ring") << "it does not accept that";
  EXPECT_EQ(chosen(one_host, Kind::allreduce, 4, 4), "links/ring") << "it is for two hosts and more";
  EXPECT_EQ(chosen(Selector(backends, 2, "allreduce=fast", rules), Kind::allreduce, 4, 64 << 20), "fast");
}

TEST(Selector, UnknownNamesListTheChoices) {
  EXPECT_EQ(refusal_of("allreduce=tree"),
            "LIGHTCC_SELECT: \"allreduce=tree\" is not understood; the choices for allreduce are compressed, 2d, "
            "shared, ring, pairwise, recursive_doubling, halving_doubling, adasum_whole, adasum_halving");
  EXPECT_EQ(refusal_of("broadcast=ring"),
            "LIGHTCC_SELECT: \"broadcast=ring\" is not understood; the choices for broadcast are shared, binomial, "
            "by_host");
  EXPECT_EQ(refusal_of("barrier=shared"),
            "LIGHTCC_SELECT: \"barrier=shared\" is not understood; the choices for barrier are dissemination");
  EXPECT_EQ(refusal_of("reduce=ring"),
            "LIGHTCC_SELECT: \"reduce=ring\" is not understood; expected <kind>=<choice>[,...] with kind one of "
            "allreduce, reducescatter, allgather, broadcast, alltoall, barrier");
  for (const char* broken : {"ring", "allreduce", "allreduce=", "=", "allreduce=ring=ring", "allreduce=shared/"})
    EXPECT_NE(refusal_of(broken), "none") << broken;
}

TEST(Selector, NoRowIsAnError) {
  EXPECT_THROW(on_one_host().choose(collective(Kind::add_group, 2, 0)), Error);
  Backend* const backends[] = {&shared};
  EXPECT_THROW(Selector(backends, 1, "").choose(collective(Kind::barrier, 2, 0)), Error) << "no backend for it";
  EXPECT_THROW(Selector().choose(collective(Kind::allreduce, 2, 4)), Error);
}

TEST(Selector, TextIsTheTable) {
  const std::string text = on_one_host().text();
  EXPECT_EQ(text.substr(0, text.find("512")),
            "kind           ranks    bytes      choice\n"
            "allreduce      any      any        shared\n"
            "reducescatter  any      any        shared\n"
            "allgather      any      any        shared\n"
            "broadcast      any      any        shared\n"
            "alltoall       any      any        shared\n"
            "allreduce      any      <= 8 KiB   links/recursive_doubling\n"
            "allreduce      any      <= ");
}

// Whatever the table says can run: no row names an algorithm that is not there.
TEST(Selector, EachKindAndSizeHasAnAlgorithm) {
  const Selector selector = on_two_hosts();
  for (Kind kind : {Kind::allreduce, Kind::reducescatter, Kind::allgather, Kind::broadcast, Kind::alltoall,
                    Kind::barrier})
    for (int size : {1, 2, 1024, 1025})
      for (int64_t bytes = 0; bytes < int64_t(1) << 40; bytes = bytes * 4 + 64)
        ASSERT_NE(selector.choose(collective(kind, size, bytes)).algorithm, nullptr) << name_of(kind) << bytes;
}

}  // namespace
}  // namespace lightcc
