// Opens AF_XDP sockets for processes that have not the privileges (docs/harp.md). It runs in the NIC's network
// namespace, as root or with CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF, until SIGTERM or SIGINT.
//
//   harpd [--socket PATH] [--allow USER[,USER...]]    names or numbers; root is always served
#include <pwd.h>
#include <signal.h>
#include <sys/signalfd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "harp_plugin/daemon/daemon.h"

namespace {

constexpr const char* kUsage = "usage: harpd [--socket PATH] [--allow USER[,USER...]]";
constexpr const char* kPath = "/run/harpd.sock";

uid_t user_of(const std::string& name) {
  char* end = nullptr;
  const unsigned long number = std::strtoul(name.c_str(), &end, 10);
  if (!name.empty() && *end == '\0') return static_cast<uid_t>(number);
  const passwd* entry = getpwnam(name.c_str());
  if (!entry) throw lightcc::Error(lightcc::Code::invalid_argument, "there is no user " + name);
  return entry->pw_uid;
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
  std::string path = kPath;
  std::set<uid_t> users;
  try {
    for (int i = 1; i < count; i += 2) {
      const std::string option = arguments[i];
      const bool allows = option == "--allow";
      if (i + 1 == count || (!allows && option != "--socket")) return std::fprintf(stderr, "%s\n", kUsage), 2;
      std::istringstream value(arguments[i + 1]);
      if (!allows) path = arguments[i + 1];
      for (std::string one; allows && std::getline(value, one, ',');) users.insert(user_of(one));
    }
    const lightcc::Fd stop = stop_signals();
    const auto log = [](const std::string& line) {
      std::printf("harpd: %s\n", line.c_str());
      std::fflush(stdout);
    };
    harp::Daemon daemon(path, users, log);
    log("listens at " + path);
    daemon.run(stop.get());
    return 0;
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "harpd: %s\n", error.what()), 1;
  }
}
