// A peer's death is noticed at once, by whatever way it came and whoever survives it.
#include "net/health/process_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace lightcc {
namespace {

using namespace std::chrono_literals;

// A process that sleeps, and, if asked, a child of it that holds all of its descriptors.
class Peer {
 public:
  explicit Peer(bool with_child = false) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const pid_t child = with_child ? fork() : 0;
      if (with_child && child == 0) for (;;) pause();
      [[maybe_unused]] ssize_t n = write(ends[1], &child, sizeof child);
      for (;;) pause();
    }
    EXPECT_EQ(read(ends[0], &child_, sizeof child_), ssize_t(sizeof child_));
    close(ends[0]), close(ends[1]);
  }
  ~Peer() {
    kill(SIGKILL);
    if (child_ > 0) ::kill(child_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Peer(const Peer&) = delete;
  void kill(int signal) const { ::kill(pid_, signal); }
  bool child_lives() const { return child_ > 0 && ::kill(child_, 0) == 0; }
  Fd pidfd() const { return Fd(int(syscall(SYS_pidfd_open, pid_, 0))); }

 private:
  pid_t pid_ = -1, child_ = 0;
};

class Ends {
 public:
  void note(int i) {
    std::lock_guard lock(mutex_);
    ended_.push_back(i);
    changed_.notify_all();
  }
  // What has ended once there are n, or after the time.
  std::vector<int> wait_for(size_t n, std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [&] { return ended_.size() >= n; });
    return ended_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> ended_;
};

std::vector<Fd> pidfds(std::initializer_list<const Peer*> peers) {
  std::vector<Fd> fds;
  for (const Peer* peer : peers) fds.push_back(peer ? peer->pidfd() : Fd());
  return fds;
}

TEST(ProcessWatch, SeesADeathAlthoughAChildLivesOn) {
  Peer peer(true);
  Ends ends;
  ProcessWatch watch(pidfds({&peer}), [&](int i) { ends.note(i); });
  EXPECT_TRUE(ends.wait_for(1, 50ms).empty());
  peer.kill(SIGKILL);
  EXPECT_EQ(ends.wait_for(1, 10s), std::vector{0});
  EXPECT_TRUE(peer.child_lives());
}

TEST(ProcessWatch, NamesWhoEndedOnceAndGoesOnWatchingTheOthers) {
  Peer first, second, third;
  Ends ends;
  ProcessWatch watch(pidfds({&first, nullptr, &second, &third}), [&](int i) { ends.note(i); });
  second.kill(SIGTERM);
  EXPECT_EQ(ends.wait_for(1, 10s), std::vector{2});
  first.kill(SIGUSR1);  // which nobody ignores, as a shell may have set SIGQUIT
  EXPECT_EQ(ends.wait_for(2, 10s), (std::vector{2, 0}));
  EXPECT_EQ(ends.wait_for(3, 50ms), (std::vector{2, 0}));
}

TEST(ProcessWatch, AStoppedProcessHasNotEnded) {
  Peer peer;
  Ends ends;
  ProcessWatch watch(pidfds({&peer}), [&](int i) { ends.note(i); });
  peer.kill(SIGSTOP);
  EXPECT_TRUE(ends.wait_for(1, 100ms).empty());
  peer.kill(SIGCONT);
  EXPECT_TRUE(ends.wait_for(1, 50ms).empty());
}

TEST(ProcessWatch, SeesWhoHadEndedBefore) {
  Peer peer;
  auto fds = pidfds({&peer});
  peer.kill(SIGKILL);
  Ends ends;
  ProcessWatch watch(std::move(fds), [&](int i) { ends.note(i); });
  EXPECT_EQ(ends.wait_for(1, 10s), std::vector{0});
}

TEST(ProcessWatch, EndsAtOnceThoughEveryoneLives) {
  Peer peer;
  const auto begin = std::chrono::steady_clock::now();
  { ProcessWatch watch(pidfds({&peer, nullptr}), [](int) { ADD_FAILURE(); }); }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 1s);
}

TEST(ProcessWatch, AProcessThatLivesHasNotEnded) {
  std::vector<Fd> own;
  own.push_back(ProcessWatch::own_pidfd());
  Ends ends;
  ProcessWatch watch(std::move(own), [&](int i) { ends.note(i); });
  EXPECT_TRUE(ends.wait_for(1, 50ms).empty());
}

}  // namespace
}  // namespace lightcc
