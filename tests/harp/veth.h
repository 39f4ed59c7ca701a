// Hosts of a network inside this process: namespaces with an interface eth0 each, on one bridge. A socket stays in the
// namespace in which it was opened, so that a test may hold those of several hosts. It takes root and iproute2.
#pragma once
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>

#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace harp {

class VethNetwork {
 public:
  // Why there can be none; "": there can.
  static std::string missing() {
    if (geteuid() != 0) return "network namespaces need root";
    return std::system("ip link >/dev/null 2>&1") == 0 ? "" : "there is no ip (iproute2)";
  }

  explicit VethNetwork(int mtu = 1500, int queues = 1) : mtu_(mtu), queues_(queues), bridge_(new_namespace()) {
    in(bridge_, [&] { run("ip link add br0 type bridge && ip link set br0 up"); });
  }

  // A new host; its address.
  std::string add() {
    const std::string number = std::to_string(hosts_.size() + 1), queues = std::to_string(queues_);
    const std::string bridge = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(bridge_.get());
    const std::string several = "numtxqueues " + queues + " numrxqueues " + queues;
    hosts_.push_back(new_namespace());
    in_host(hosts_.size() - 1, [&] {
      run("ip link set lo up");
      run("ip link add eth0 mtu " + std::to_string(mtu_) + " " + several + " type veth peer name port" + number +
          " mtu " + std::to_string(mtu_) + " " + several + " netns " + bridge);
      run("ip address add 10.9.0." + number + "/16 dev eth0 && ip link set eth0 up");
    });
    in(bridge_, [&] { run("ip link set port" + number + " master br0 up"); });
    return "10.9.0." + number;
  }

  template <class F>
  void in_host(size_t host, F&& f) {
    in(hosts_.at(host), f);
  }
  // Without privileges: the kernel's users are of threads.
  template <class F>
  void in_host_as(uid_t user, size_t host, F&& f) {
    in_host(host, [&] {
      if (syscall(SYS_setresuid, user, user, user) != 0) throw lightcc::system_error("becoming another user");
      f();
    });
  }
  void run_in_host(size_t host, const std::string& command) {
    in_host(host, [&] { run(command); });
  }

 private:
  static lightcc::Fd new_namespace() {
    lightcc::Fd made;
    std::thread([&] {
      if (unshare(CLONE_NEWNET) == 0) made = lightcc::Fd(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    }).join();
    if (!made) throw lightcc::system_error("making a network namespace");
    return made;
  }
  template <class F>
  static void in(const lightcc::Fd& place, F&& f) {
    std::exception_ptr failed;
    std::thread([&] {
      try {
        if (setns(place.get(), CLONE_NEWNET) != 0) throw lightcc::system_error("entering a network namespace");
        f();
      } catch (...) {
        failed = std::current_exception();
      }
    }).join();
    if (failed) std::rethrow_exception(failed);
  }
  static void run(const std::string& command) {
    if (std::system(command.c_str()) != 0) throw std::runtime_error("this failed: " + command);
  }

  const int mtu_, queues_;
  lightcc::Fd bridge_;
  std::vector<lightcc::Fd> hosts_;
};

}  // namespace harp
