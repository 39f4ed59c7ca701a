#include "api/launcher_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "base/clock.h"
#include "base/text.h"
#include "base/types.h"

namespace lightcc {
namespace {

constexpr size_t kLongestCause = 300, kTalkBytes = 4096;

// LIGHTCC_LAUNCHER_FD is "descriptor:inode": a process that has the variable and not the socket may have another file
// under that number.
int launchers_socket(const Environment& env) {
  const char* text = env("LIGHTCC_LAUNCHER_FD");
  if (!text) return -1;
  const std::string value = text;
  int fd = -1;
  unsigned long inode = 0;
  const char* end = value.data() + value.size();
  const auto number = std::from_chars(value.data(), end, fd);
  if (number.ec != std::errc() || number.ptr == end || *number.ptr != ':' || fd < 0) return -1;
  if (const auto last = std::from_chars(number.ptr + 1, end, inode); last.ec != std::errc() || last.ptr != end)
    return -1;
  struct stat found {};
  return fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) && found.st_ino == inode ? fd : -1;
}

std::string text_of_members(const World& world) {
  if (world.members.empty()) return "all";
  std::string text = text_of(world.members);
  std::erase(text, ' ');
  return text;
}

}  // namespace

LauncherChannel::LauncherChannel(const World& world, const Environment& env, Cancellation& cancellation)
    : cancellation_(cancellation) {
  if (world.launcher != "lightccrun" || world.size == 1) return;
  socket_ = launchers_socket(env);
  if (socket_ < 0) return;
  fcntl(socket_, F_SETFD, FD_CLOEXEC);  // what this process starts is not the rank
  number_ = std::to_string(now_ns());
  say("begin " + number_ + " " + text_of_members(world));
  over_.emplace();
  thread_ = std::thread([this] { listen(); });
}

LauncherChannel::~LauncherChannel() {
  if (socket_ < 0) return;
  over_->cancel(Error(Code::shut_down, "init is over"));
  thread_.join();
  say("left " + number_);
}

void LauncherChannel::formed() { say("formed " + number_); }

void LauncherChannel::say(const std::string& line) const {
  const std::string text = line + "\n";
  if (socket_ >= 0) (void)!send(socket_, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);  // it may be gone
}

void LauncherChannel::listen() {
  std::string pending;
  char chunk[kTalkBytes];
  while (true) {
    pollfd waits[] = {{socket_, POLLIN, 0}, {over_->fd(), POLLIN, 0}};
    if (poll(waits, 2, -1) < 0 && errno != EINTR) return;
    if (over_->cancelled()) return;
    const ssize_t size = recv(socket_, chunk, sizeof chunk, MSG_DONTWAIT);
    if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) return;  // the launcher is gone
    pending.append(chunk, size_t(std::max<ssize_t>(size, 0)));
    for (size_t end; (end = pending.find('\n')) != pending.npos; pending.erase(0, end + 1))
      if (heed(pending.substr(0, end))) return;
  }
}

bool LauncherChannel::heed(const std::string& line) {
  const std::string begin = "cancel " + number_ + " ";
  if (!line.starts_with(begin)) return false;  // of an init that is over
  const std::string_view cause = truncate_utf8(std::string_view(line).substr(begin.size()), kLongestCause);
  cancellation_.cancel(Error(Code::shut_down, "init: " + std::string(cause)));
  return true;
}

}  // namespace lightcc
