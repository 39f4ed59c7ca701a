#include "engine/lifecycle/health_events.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

TEST(HealthEvents, OfHostsAreTakenOnce) {
  HealthEvents events(2);
  events.host_lost(3);
  events.host_unheard(1);
  events.host_lost(2);
  events.ended_elsewhere({Code::timeout, "stalled"});
  const HealthEvents::OfHosts first = events.take(), second = events.take();
  EXPECT_EQ(first.lost, (std::vector{3, 2}));
  EXPECT_EQ(first.unheard, (std::vector{1}));
  ASSERT_TRUE(first.ended_elsewhere);
  EXPECT_EQ(first.ended_elsewhere->code, Code::timeout);
  EXPECT_EQ(first.ended_elsewhere->text, "stalled");
  EXPECT_TRUE(second.lost.empty());
  EXPECT_TRUE(second.unheard.empty());
  EXPECT_FALSE(second.ended_elsewhere);
}

TEST(HealthEvents, TheFirstCauseHoldsUntilItIsTaken) {
  HealthEvents events(2);
  events.ended_elsewhere({Code::timeout, "first"});
  events.ended_elsewhere({Code::peer_lost, "second"});
  EXPECT_EQ(events.take().ended_elsewhere->text, "first");
  events.ended_elsewhere({Code::peer_lost, "third"});
  EXPECT_EQ(events.take().ended_elsewhere->text, "third");
}

// A rank may still be here, by what its memory says, when its process is first seen to have ended.
TEST(HealthEvents, AnEndedProcessIsRemembered) {
  HealthEvents events(3);
  events.process_ended(1);
  events.take();
  EXPECT_FALSE(events.has_process_ended(0));
  EXPECT_TRUE(events.has_process_ended(1));
  EXPECT_FALSE(events.has_process_ended(2));
}

}  // namespace
}  // namespace lightcc
