// A wait ends when its time has come or another thread cancels it.
#include "base/deadline.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <chrono>
#include <thread>

#include "base/clock.h"
#include "unit/helpers.h"

namespace lightcc {
namespace {

bool readable(int fd, const Deadline& deadline) { return wait_for(fd, POLLIN, deadline, "waiting"); }

TEST(Deadline, IsOverWhenItsTimeHasCome) {
  EXPECT_FALSE(Deadline(in_ms(20'000)).over());
  EXPECT_TRUE(Deadline(now_ns()).over());
  EXPECT_FALSE(Deadline(now_ns()).cancelled());
  EXPECT_EQ(Deadline(now_ns()).error(Error(Code::timeout, "late")).code(), Code::timeout);
}

TEST(Deadline, TheFirstCauseStays) {
  Cancellation cancellation;
  const Deadline deadline(in_ms(20'000), &cancellation);
  EXPECT_FALSE(deadline.over());
  cancellation.cancel(Error(Code::shut_down, "first"));
  cancellation.cancel(Error(Code::internal, "second"));
  EXPECT_TRUE(deadline.over());
  const Error error = deadline.error(Error(Code::timeout, "late"));
  EXPECT_EQ(error.code(), Code::shut_down);
  EXPECT_STREQ(error.what(), "first");
  EXPECT_TRUE(deadline.at(in_ms(30'000)).cancelled()) << "another time, cancelled by the same";
}

TEST(Deadline, AWaitForADescriptorEndsWithIt) {
  Cancellation cancellation;
  const Fd quiet(eventfd(0, EFD_CLOEXEC)), ready(eventfd(1, EFD_CLOEXEC));
  EXPECT_TRUE(readable(ready.get(), {in_ms(20'000), &cancellation}));
  EXPECT_FALSE(readable(quiet.get(), {in_ms(5), &cancellation}));
  const uint64_t begin = now_ns();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    cancellation.cancel(Error(Code::shut_down, ""));
  });
  EXPECT_FALSE(readable(quiet.get(), {in_ms(20'000), &cancellation}));
  other.join();
  EXPECT_LT(now_ns() - begin, 10'000'000'000u);
  EXPECT_FALSE(readable(ready.get(), {in_ms(20'000), &cancellation})) << "and stays over";
}

// A cancellation counts as no descriptor of the caller's.
TEST(Deadline, PollTellsWhichOfTheDescriptorsAreReady) {
  Cancellation cancellation;
  const Fd quiet(eventfd(0, EFD_CLOEXEC)), ready(eventfd(1, EFD_CLOEXEC));
  std::vector<pollfd> both{{quiet.get(), POLLIN, 0}, {ready.get(), POLLIN, 0}}, one{both[0]};
  const Deadline deadline(in_ms(20'000), &cancellation);
  EXPECT_EQ(poll_until(both, deadline, UINT64_MAX), 1);
  EXPECT_EQ(both.size(), 2u);
  EXPECT_EQ(both[1].revents, POLLIN);
  EXPECT_EQ(poll_until(one, deadline, 1'000'000), 0);
  cancellation.cancel(Error(Code::shut_down, ""));
  EXPECT_EQ(poll_until(both, deadline, UINT64_MAX), 1);
  EXPECT_EQ(poll_until(one, deadline, UINT64_MAX), 0);
  EXPECT_FALSE(sleep_until(deadline));
}

}  // namespace
}  // namespace lightcc
