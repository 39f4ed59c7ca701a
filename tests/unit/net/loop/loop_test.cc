// The loop transport keeps the Link contract, gentle or faulty, and its faults are what they say.
#include "net/loop/loop.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "contracts/link_contract.h"

namespace lightcc {
namespace {

template <size_t record_bytes, size_t capacity, int fault_percent>
struct LoopPair {
  LoopNetwork transport{2, {record_bytes, capacity, fault_percent / 100.0, fault_percent / 100.0, 7}};
  Link& a() { return *transport.link(0, 1); }
  Link& b() { return *transport.link(1, 0); }
};
using LoopRows = testing::Types<LoopPair<65536, 4, 0>, LoopPair<100, 1, 0>, LoopPair<1000, 3, 50>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Loop, LinkContract, LoopRows);

std::string thrown_by(const std::function<void()>& call, Code expected) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  return "nothing";
}

TEST(Loop, ACutLinkThrowsFromEachCallAndNamesThePeer) {
  LoopNetwork transport(3);
  Link& link = *transport.link(2, 0);
  ASSERT_NE(link.reserve(8), nullptr);
  transport.cut(0, 2);
  const std::function<void()> calls[] = {[&] { link.reserve(8); }, [&] { link.commit(8); }, [&] { link.peek(8); },
                                         [&] { link.consume(8); }};
  for (const auto& call : calls) {
    const std::string text = thrown_by(call, Code::peer_lost);
    EXPECT_NE(text.find("rank 2 cannot"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 0: the link is cut"), std::string::npos) << text;
  }
  EXPECT_NE(thrown_by([&] { transport.link(0, 2)->peek(8); }, Code::peer_lost), "nothing");
  EXPECT_EQ(transport.link(0, 1)->peek(8), nullptr) << "another link broke";
  transport.lose(1);
  EXPECT_NE(thrown_by([&] { transport.link(0, 1)->peek(8); }, Code::peer_lost), "nothing");
  EXPECT_NE(thrown_by([&] { transport.link(2, 1)->peek(8); }, Code::peer_lost), "nothing");
}

TEST(Loop, CutsAfterTheRecordsGranted) {
  LoopNetwork transport(4);
  transport.cut(3, 1, 2);
  for (int record = 0; record < 2; ++record) {
    ASSERT_NE(transport.link(1, 3)->reserve(8), nullptr);
    transport.link(1, 3)->commit(8);
  }
  EXPECT_NE(thrown_by([&] { transport.link(3, 1)->peek(8); }, Code::peer_lost), "nothing");
}

TEST(Loop, SizesMustAgreeAtBothEnds) {
  LoopNetwork transport(2, {.record_bytes = 64});
  Link &a = *transport.link(0, 1), &b = *transport.link(1, 0);
  EXPECT_NE(thrown_by([&] { a.reserve(65); }, Code::internal), "nothing");
  EXPECT_NE(thrown_by([&] { a.commit(8); }, Code::internal), "nothing");
  a.reserve(8);
  EXPECT_NE(thrown_by([&] { a.commit(7); }, Code::internal), "nothing");
  a.commit(8);
  EXPECT_EQ(thrown_by([&] { b.peek(16); }, Code::internal),
            "rank 1 tried to receive 16 bytes on its link with rank 0, but 8 came");
}

// The same seed makes the same refusals; another seed others.
TEST(Loop, FaultsReplayFromTheirSeed) {
  const auto refusals = [](uint64_t seed) {
    LoopNetwork transport(2, {.refuse = 0.5, .seed = seed});
    std::vector<bool> pattern;
    for (int i = 0; i < 64; ++i) pattern.push_back(transport.link(0, 1)->reserve(8) == nullptr);
    return pattern;
  };
  EXPECT_EQ(refusals(1), refusals(1));
  EXPECT_NE(refusals(1), refusals(2));
}

TEST(Loop, DelayHidesARecordForAWhile) {
  LoopNetwork transport(2, {.delay = 0.9});
  int hidden = 0;
  for (int record = 0; record < 50; ++record) {
    ASSERT_NE(transport.link(0, 1)->reserve(8), nullptr);
    transport.link(0, 1)->commit(8);
    while (!transport.link(1, 0)->peek(8)) ASSERT_LT(++hidden, 50 * 1000);
    transport.link(1, 0)->consume(8);
  }
  EXPECT_GT(hidden, 50);
}

}  // namespace
}  // namespace lightcc
