// The member's half of the negotiation: what it sends for a request, and what it makes of the answer.
#include "engine/negotiate/control/response_cache.h"
#include "unit/announcements.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using test::allreduce;

std::string sent(const UpMessage& message) {
  if (auto* cached = std::get_if<CachedRequest>(&message))
    return "cached " + std::to_string(cached->id) + "." + std::to_string(cached->generation);
  return "announce " + std::get<Announce>(message).key;
}
Response fresh(const std::string& key, uint32_t id, uint32_t generation) { return {id, generation, true, key, {}}; }

TEST(ResponseCache, AnnouncesInFullThenByNumber) {
  ResponseCache cache;
  std::optional<std::string> again;
  EXPECT_EQ(sent(cache.announce("a", allreduce(1))), "announce a");
  Response response = fresh("a", 3, 1);
  response.rows = {{5, 6}};
  EXPECT_EQ(cache.apply(response, &again).key, "a");
  EXPECT_EQ(sent(cache.announce("a", allreduce(1))), "cached 3.1");
  const Response& remembered = cache.apply({3, 1, false, "", {}}, &again);
  EXPECT_EQ(remembered.key, "a");
  EXPECT_EQ(remembered.rows, response.rows);
  EXPECT_EQ(again, std::nullopt);
}

TEST(ResponseCache, WhatHasChangedIsAnnouncedInFull) {
  ResponseCache cache;
  std::optional<std::string> again;
  cache.announce("a", allreduce(1));
  cache.apply(fresh("a", 0, 1), &again);
  EXPECT_EQ(sent(cache.announce("a", allreduce(2))), "announce a");
  cache.apply(fresh("a", 0, 2), &again);
  EXPECT_EQ(sent(cache.announce("a", allreduce(2))), "cached 0.2");
  cache.forget("a");  // it failed
  EXPECT_EQ(sent(cache.announce("a", allreduce(2))), "announce a");
  cache.forget("never heard of");
}

TEST(ResponseCache, ANumberGivenAwayIsAnnouncedAgainIfItWasOnTheWay) {
  for (bool in_flight : {true, false}) {
    ResponseCache cache;
    std::optional<std::string> again;
    cache.announce("a", allreduce(1));
    cache.apply(fresh("a", 0, 1), &again);
    cache.announce("b", allreduce(1));
    if (in_flight) cache.announce("a", allreduce(1));
    cache.apply(fresh("b", 0, 2), &again);
    EXPECT_EQ(again.has_value(), in_flight);
    EXPECT_EQ(sent(cache.announce("a", allreduce(1))), "announce a");
  }
}

TEST(ResponseCache, WhatHasNoNumberIsNotRemembered) {
  ResponseCache cache;
  std::optional<std::string> again;
  cache.announce("a", allreduce(1));
  EXPECT_EQ(cache.apply(fresh("a", kNoId, 0), &again).key, "a");
  EXPECT_EQ(sent(cache.announce("a", allreduce(1))), "announce a");
}

TEST(ResponseCache, ANumberThatWasNeverGivenIsAFault) {
  ResponseCache cache;
  std::optional<std::string> again;
  const auto is_fault = [&](uint32_t id) {
    try {
      cache.apply({id, 1, false, "", {}}, &again);
      ADD_FAILURE() << id << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::internal);
      EXPECT_STREQ(error.what(), "the coordinator named a request by a number it never gave");
    }
  };
  is_fault(3);
  cache.announce("a", allreduce(1));
  cache.apply(fresh("a", 3, 1), &again);
  is_fault(4);
  cache.forget("a");
  is_fault(3);
}

TEST(ResponseCache, WhatIsOnTheWayInFullIsNotAnnouncedAgain) {
  ResponseCache cache;
  std::optional<std::string> again;
  cache.announce("a", allreduce(1));
  cache.apply(fresh("a", 0, 1), &again);
  cache.announce("a", allreduce(2));
  cache.apply(fresh("b", 0, 2), &again);
  EXPECT_EQ(again, std::nullopt);
  EXPECT_EQ(cache.apply(fresh("a", 1, 3), &again).key, "a");
  EXPECT_EQ(sent(cache.announce("a", allreduce(2))), "cached 1.3");
}

TEST(ResponseCache, AfterItHasRunANumberMayBeGivenAway) {
  ResponseCache cache;
  std::optional<std::string> again;
  cache.announce("a", allreduce(1));
  cache.apply(fresh("a", 0, 1), &again);
  cache.announce("a", allreduce(1));
  cache.apply({0, 1, false, "", {}}, &again);
  cache.apply(fresh("b", 0, 2), &again);
  EXPECT_EQ(again, std::nullopt);
}

// A rank that has joined hears of requests that it has not announced.
TEST(ResponseCache, AResponseWithoutAnAnnouncementIsTaken) {
  ResponseCache cache;
  std::optional<std::string> again;
  EXPECT_EQ(cache.apply(fresh("a", 0, 1), &again).key, "a");
  EXPECT_EQ(cache.apply({0, 1, false, "", {}}, &again).key, "a");
  EXPECT_EQ(sent(cache.announce("a", allreduce(1))), "announce a") << "what it is was not remembered";
}

}  // namespace
}  // namespace lightcc
