#include "collective/selector.h"

#include <gtest/gtest.h>

#include "base/error.h"

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
std::string chosen(const Selector& selector, Kind kind, int size, int64_t bytes, std::string_view backend = {}) {
  return text_of(selector.choose(collective(kind, size, bytes), backend));
}

TEST(Selector, SizeDecidesBetweenHosts) {
  const Selector selector(false, "");
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

TEST(Selector, OneHostSharesMemory) {
  const Selector selector(true, "");
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, 4), "shared");
  EXPECT_EQ(chosen(selector, Kind::reducescatter, 4, 64 << 20), "shared");
  EXPECT_EQ(chosen(selector, Kind::allgather, 4, 64 << 20), "shared");
  EXPECT_EQ(chosen(selector, Kind::allreduce, 4, 64 << 20, "links"), "links/ring") << "when the first cannot";
}

TEST(Selector, AdasumHasItsOwnRows) {
  Collective c = collective(Kind::allreduce, 4, 64 << 20);
  c.op = ReduceOp::adasum;
  const Collective small = [&] { Collective s = c; s.count = 1; return s; }();
  for (bool one_host : {false, true})
    for (const char* forced : {"", "allreduce=ring", "allreduce=shared"}) {
      const Selector selector(one_host, forced);
      EXPECT_EQ(text_of(selector.choose(c)), "links/adasum_halving");
      EXPECT_EQ(text_of(selector.choose(small)), "links/adasum_whole");
    }
  const Selector forced(true, "allreduce=adasum_whole");
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
  const Selector one_host(true, " allreduce=ring, broadcast = binomial,reducescatter=shared,,allgather=links/bruck");
  EXPECT_EQ(chosen(one_host, Kind::allreduce, 4, 4), "links/ring");
  EXPECT_EQ(chosen(one_host, Kind::reducescatter, 4, 4), "shared");
  EXPECT_EQ(chosen(one_host, Kind::allgather, 4, 64 << 20), "links/bruck");
  const Selector hosts(false, "reducescatter=shared");
  EXPECT_EQ(chosen(hosts, Kind::reducescatter, 4, 4), "links/pairwise") << "no memory is shared between hosts";
  EXPECT_NE(one_host.text().find("links/ring  (forced)"), std::string::npos) << one_host.text();
}

std::string refusal_of(std::string_view forced) {
  try {
    Selector selector(true, forced);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "none";
}

TEST(Selector, UnknownNamesListTheChoices) {
  EXPECT_EQ(refusal_of("allreduce=tree"),
            "LIGHTCC_SELECT: \"allreduce=tree\" is not understood; the choices for allreduce are shared, ring, "
            "recursive_doubling, halving_doubling, adasum_whole, adasum_halving");
  EXPECT_EQ(refusal_of("broadcast=ring"),
            "LIGHTCC_SELECT: \"broadcast=ring\" is not understood; the choices for broadcast are shared, binomial");
  EXPECT_EQ(refusal_of("barrier=shared"),
            "LIGHTCC_SELECT: \"barrier=shared\" is not understood; the choices for barrier are dissemination");
  EXPECT_EQ(refusal_of("reduce=ring"),
            "LIGHTCC_SELECT: \"reduce=ring\" is not understood; expected <kind>=<choice>[,...] with kind one of "
            "allreduce, reducescatter, allgather, broadcast, alltoall, barrier");
  for (const char* broken : {"ring", "allreduce", "allreduce=", "=", "allreduce=ring=ring", "allreduce=shared/"})
    EXPECT_NE(refusal_of(broken), "none") << broken;
}

TEST(Selector, NoRowIsAnError) {
  const Selector selector(false, "");
  EXPECT_THROW(selector.choose(collective(Kind::add_group, 2, 0)), Error);
  EXPECT_THROW(selector.choose(collective(Kind::allreduce, 2, 4), "shared"), Error);
}

TEST(Selector, TextIsTheTable) {
  const std::string text = Selector(true, "").text();
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
  const Selector selector(false, "");
  for (Kind kind : {Kind::allreduce, Kind::reducescatter, Kind::allgather, Kind::broadcast, Kind::alltoall,
                    Kind::barrier})
    for (int size : {1, 2, 1024, 1025})
      for (int64_t bytes = 0; bytes < int64_t(1) << 40; bytes = bytes * 4 + 64)
        ASSERT_NE(selector.choose(collective(kind, size, bytes)).algorithm, nullptr) << name_of(kind) << bytes;
}

}  // namespace
}  // namespace lightcc
