// Opens AF_XDP sockets for processes that have not the privileges (docs/harp.md). It runs in the NIC's network
// namespace, as root, until SIGTERM or SIGINT.
//
//   harpd [--socket PATH] [--allow USER[,USER...]] [--group GROUP]    names or numbers; root is always served
#include <grp.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>

#include "harp_plugin/daemon/daemon.h"

namespace {

constexpr const char* kUsage =
    "usage: harpd [--socket PATH] [--allow USER[,USER...]] [--group GROUP]\n"
    "Opens AF_XDP sockets for processes that have not the privileges. Users and groups: names or numbers.\n"
    "  --socket PATH    where it listens; /run/harpd.sock by default\n"
    "  --allow USERS    who is served beside root\n"
    "  --group GROUP    who may connect beside root; without it anybody, who is then refused\n";

std::optional<unsigned> number_of(const std::string& text) {
  char* end = nullptr;
  const unsigned long number = std::strtoul(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') return {};
  return static_cast<unsigned>(number);
}

uid_t user_of(const std::string& name) {
  if (const auto number = number_of(name)) return *number;
  const passwd* entry = getpwnam(name.c_str());
  if (!entry) throw lightcc::Error(lightcc::Code::invalid_argument, "there is no user " + name);
  return entry->pw_uid;
}

gid_t group_of(const std::string& name) {
  if (const auto number = number_of(name)) return *number;
  const group* entry = getgrnam(name.c_str());
  if (!entry) throw lightcc::Error(lightcc::Code::invalid_argument, "there is no group " + name);
  return entry->gr_gid;
}

// Their reader may be slow, or gone: then lines are lost, and nobody waits.
void print_line(const std::string& line) {
  const std::string text = "harpd: " + line + "\n";
  pollfd reader{STDOUT_FILENO, POLLOUT, 0};
  if (poll(&reader, 1, 0) == 1 && (reader.revents & POLLOUT))
    [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
}

// As many as it may have: clients' sockets and memory take some each.
void raise_descriptors() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// SIGTERM and SIGINT, as a descriptor that becomes readable.
lightcc::Fd stop_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  lightcc::Fd made(signalfd(-1, &signals, SFD_CLOEXEC));
  if (!made) throw lightcc::system_error("watching signals");
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  harp::DaemonOptions options{.path = "/run/harpd.sock", .log = print_line};
  if (count > 1 && std::string(arguments[1]) == "--help") return std::fputs(kUsage, stdout), 0;
  try {
    for (int i = 1; i < count; i += 2) {
      const std::string option = arguments[i];
      if (i + 1 == count) return std::fputs(kUsage, stderr), 2;
      std::istringstream value(arguments[i + 1]);
      if (option == "--socket")
        options.path = value.str();
      else if (option == "--group")
        options.group = group_of(value.str());
      else if (option == "--allow")
        for (std::string one; std::getline(value, one, ',');) options.users.insert(user_of(one));
      else
        return std::fputs(kUsage, stderr), 2;
    }
    signal(SIGPIPE, SIG_IGN);
    raise_descriptors();
    const lightcc::Fd stop = stop_signals();
    harp::Daemon daemon(options);
    print_line("listens at " + options.path);
    daemon.run(stop.get());
    return 0;
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "harpd: %s\n", error.what()), 1;
  }
}
