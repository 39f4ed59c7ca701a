#include "base/log.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ctime>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lightcc {
namespace {

// stderr for the life of this object: a socket that keeps each write(2) apart from the next.
class Captured {
 public:
  Captured() {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends_) != 0) throw std::runtime_error("socketpair");
    saved_ = dup(STDERR_FILENO);
    dup2(ends_[1], STDERR_FILENO);
  }
  ~Captured() {
    dup2(saved_, STDERR_FILENO);
    for (int fd : {saved_, ends_[0], ends_[1]}) close(fd);
  }
  std::vector<std::string> writes() {
    std::vector<std::string> all;
    char text[4096];
    for (ssize_t n; (n = recv(ends_[0], text, sizeof text, MSG_DONTWAIT)) > 0;) all.emplace_back(text, n);
    return all;
  }

 private:
  int ends_[2], saved_;
};

std::chrono::system_clock::time_point at(int hour, int minute, int second, int ms) {
  std::tm local{};
  local.tm_year = 126, local.tm_mon = 0, local.tm_mday = 2;
  local.tm_hour = hour, local.tm_min = minute, local.tm_sec = second, local.tm_isdst = -1;
  return std::chrono::system_clock::from_time_t(std::mktime(&local)) + std::chrono::milliseconds(ms);
}

class Log : public testing::Test {
  void TearDown() override { set_log(3, false, 0, "h"); }  // other tests look for warnings
};

TEST_F(Log, LineNamesLevelRankHostAndTime) {
  set_log(3, false, 1, "h");
  EXPECT_EQ(log_line(Level::warning, "text", at(12, 34, 56, 789)),
            "[lightcc WARNING rank 1 host h 12:34:56.789] text\n");
  EXPECT_EQ(log_line(Level::error, "x", at(1, 2, 3, 4)), "[lightcc ERROR rank 1 host h 01:02:03.004] x\n");
}

TEST_F(Log, TimeCanBeHidden) {
  set_log(3, true, 0, "node-7");
  EXPECT_EQ(log_line(Level::info, "text", at(0, 0, 0, 0)), "[lightcc INFO rank 0 host node-7] text\n");
}

TEST_F(Log, LinesBelowTheLevelAreDropped) {
  set_log(4, true, 2, "h");
  Captured captured;
  log(Level::warning, "dropped");
  log(Level::error, "kept");
  log(Level::fatal, "kept too");
  const std::vector<std::string> expected{"[lightcc ERROR rank 2 host h] kept\n",
                                          "[lightcc FATAL rank 2 host h] kept too\n"};
  EXPECT_EQ(captured.writes(), expected);
}

TEST_F(Log, ThreadsWriteWholeLines) {
  set_log(0, true, 0, "h");
  Captured captured;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 10; ++i) log(Level::trace, std::string(200, static_cast<char>('a' + t)));
    });
  }
  for (auto& thread : threads) thread.join();
  const auto writes = captured.writes();
  EXPECT_EQ(writes.size(), 40u);
  for (const auto& line : writes) {
    EXPECT_EQ(line.find("[lightcc TRACE rank 0 host h] "), 0u);
    EXPECT_EQ(line.find_first_not_of(line[30], 30), line.size() - 1) << line;
    EXPECT_EQ(line.back(), '\n');
  }
}

}  // namespace
}  // namespace lightcc
