// harpd: whom it serves and with what, what it refuses, what is left when either side ends.
#include "harp_plugin/daemon/daemon.h"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/un.h>

#include <deque>
#include <future>

#include "base/error.h"
#include "harp/lingering.h"
#include "harp/xdp_hosts.h"
#include "harp_plugin/port/descriptors.h"
#include "harp_plugin/port/udp.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using contract::make;
using lightcc::Fd;

constexpr uid_t kUser = 65534, kOther = 65533;

// On host 0, in a thread of this process.
class Harpd : public XdpHosts {
 protected:
  void SetUp() override {
    XdpHosts::SetUp();
    if (IsSkipped()) return;
    add_host();
    path_ = testing::TempDir() + "harpd-" + std::to_string(getpid());
    start();
  }
  void TearDown() override {
    stop();
    unlink((path_ + ".lock").c_str());
  }

  void start(int queues = 1) {
    if (queues > 1) network_ = std::make_unique<VethNetwork>(1500, queues), addresses_.clear(), add_host();
    listen();
    run();
  }
  void listen() {
    stop_ = Fd(eventfd(0, EFD_CLOEXEC));
    log_.clear();
    const auto log = [this](const std::string& line) { log_.push_back(line); };
    network_->in_host(0, [&] {
      daemon_ = std::make_unique<Daemon>(DaemonOptions{.path = path_, .users = {kUser}, .log = log});
    });
  }
  void run() {
    std::promise<void> entered;
    runs_ = std::thread([&, this] {
      network_->in_host(0, [&] {
        thread_ = gettid();
        entered.set_value();
        daemon_->run(stop_.get());
      });
    });
    entered.get_future().wait();
  }
  void stop() {
    if (!runs_.joinable()) return;
    eventfd_write(stop_.get(), 1);
    runs_.join();
    daemon_.reset();
  }

  std::unique_ptr<XdpPort> open_by_harpd(uid_t user = kUser, bool survives = false, uint32_t queues = 0) {
    std::unique_ptr<XdpPort> port;
    network_->in_host_as(user, 0, [&] {
      port = open_xdp(
          {.udp = {.address = addresses_[0]}, .queues = queues, .harpd = path_, .survives_harpd = survives});
    });
    return port;
  }
  std::string refusal(const std::function<void()>& attempt) {
    try {
      attempt();
    } catch (const lightcc::Error& error) {
      return error.what();
    }
    return "it was served";
  }
  // What these sockets are refused with.
  std::string refusal_of(std::span<const int> sockets, const std::string& interface = "eth0") {
    return refusal([&] {
      network_->in_host_as(kUser, 0, [&] { lease_from_harpd(path_, {.interface = interface}, sockets); });
    });
  }
  // Undone is what is left of a client a moment after it has gone.
  void expect_nothing_attached() {
    network_->run_in_host(0, "for i in $(seq 100); do ip link show dev eth0 | grep -q xdp || exit 0; sleep 0.05; done; "
                             "exit 1");
  }

  // A connection to harpd of this user, which has asked for the packets of `socket` (-1: not yet).
  Fd ask(uid_t user, int socket) {
    Fd made;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, path_.size());
    network_->in_host_as(user, 0, [&] {
      made = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      ASSERT_EQ(connect(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    });
    HarpdRequest request;
    std::strcpy(request.interface, "eth0");
    if (socket < 0) return made;
    EXPECT_TRUE(send_with_descriptors(made.get(), &request, sizeof request, std::array{socket}));
    return made;
  }
  static void give_up(const Fd& socket) {  // its port, if the kernel has chosen it, and its device
    sockaddr unspecified{};
    unspecified.sa_family = AF_UNSPEC;
    EXPECT_EQ(connect(socket.get(), &unspecified, sizeof unspecified), 0);
  }
  static void wait_until_closed(const Fd& connection) {
    pollfd one{connection.get(), 0, 0};
    EXPECT_EQ(poll(&one, 1, int(std::chrono::milliseconds(contract::kPatience).count())), 1);
  }

  std::string path_;
  std::vector<std::string> log_;  // of the daemon's thread: read it when that has ended
  Fd stop_;
  std::unique_ptr<Daemon> daemon_;
  std::thread runs_;
  pid_t thread_ = 0;  // in which it runs
};

TEST_F(Harpd, AProcessWithoutPrivilegesPassesTheKernel) {
  const auto other = open(add_host());
  {
    const auto port = open_by_harpd();
    find_each_other(*port, *other);
    find_each_other(*other, *port);
    EXPECT_EQ(send_all(*other, *port, 2000, 1400), 2000u);
    EXPECT_EQ(send_all(*port, *other, 2000, 1400), 2000u);
    EXPECT_EQ(port->counters().received_by_kernel, 0u);
    network_->run_in_host(0, "ip link show dev eth0 | grep -q xdp");
  }
  expect_nothing_attached();
}

TEST_F(Harpd, OtherUsersAreRefused) {
  EXPECT_NE(refusal([&] { open_by_harpd(kOther); }).find("user 65533 is not served"), std::string::npos);
  open_by_harpd(0);
  open_by_harpd();
}

// A port is served for who holds the socket that is bound to it, and for nobody who only names it.
TEST_F(Harpd, OnlySocketsOfThisInterfaceAreServed) {
  const auto expect = [&](const std::string& said, const char* part) {
    EXPECT_NE(said.find(part), std::string::npos) << said << ", not: " << part;
  };
  const Fd bound = udp_socket(0);
  expect(refusal_of(std::array{bound.get()}, "lo"), "not bound to an address of lo");
  expect(refusal_of({}), "1 to 8 UDP sockets are expected, not 0");
  expect(refusal_of(std::vector<int>(9, bound.get())), "not 9");
  const Fd file(::open("/dev/null", O_RDWR | O_CLOEXEC));
  expect(refusal_of(std::array{bound.get(), file.get()}), "no socket");
  Fd unbound, tcp;
  network_->in_host(0, [&] {
    unbound = Fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    tcp = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  });
  expect(refusal_of(std::array{unbound.get()}), "not bound");
  expect(refusal_of(std::array{tcp.get()}), "not UDP");
  add_host();
  const Fd elsewhere = udp_socket(1);
  expect(refusal_of(std::array{elsewhere.get()}), "another network namespace");
  expect_nothing_attached();
}

TEST_F(Harpd, APortAndAQueueAreServedOnce) {
  const Fd socket = udp_socket(0);
  XdpLease lease;
  network_->in_host_as(kUser, 0, [&] {
    lease = lease_from_harpd(path_, {.interface = "eth0"}, std::array{socket.get()});
  });
  EXPECT_EQ(lease.sockets.size(), 1u);
  EXPECT_NE(refusal_of(std::array{socket.get()}).find("is served for process"), std::string::npos);
  EXPECT_NE(refusal([&] { open_by_harpd(); }).find("all 1 queues of eth0 are in use"), std::string::npos);
  EXPECT_NE(refusal([&] { open(0); }).find("has one already"), std::string::npos) << "by own privileges beside it";
}

// Whoever is served and closes its UDP socket has the port no longer; harpd holds it for as long as it serves it.
TEST_F(Harpd, APortThatIsServedCannotBecomeAnothers) {
  Fd socket = udp_socket(0);
  const sockaddr_in port = address_of_socket(socket.get());
  const auto is_free = [&] {
    Fd other;
    network_->in_host(0, [&] { other = Fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)); });
    return bind(other.get(), reinterpret_cast<const sockaddr*>(&port), sizeof port) == 0;
  };
  XdpLease lease;
  network_->in_host_as(kUser, 0, [&] {
    lease = lease_from_harpd(path_, {.interface = "eth0"}, std::array{socket.get()});
  });
  const Fd same = lightcc::duplicate(socket.get());
  socket = Fd();
  EXPECT_FALSE(is_free());
  give_up(same);
  EXPECT_FALSE(is_free());
  const Fd chosen = udp_socket(0, 0);
  EXPECT_NE(refusal_of(std::array{chosen.get()}).find("the kernel has chosen"), std::string::npos);
}

// Sockets of several users may be bound to one port if each is bound to another device.
TEST_F(Harpd, OnlyWhatComesToTheInterfaceItselfIsServed) {
  Fd victim = udp_socket(0, 5555, "eth0");
  const Fd thief = udp_socket(0, 5555, "lo");
  EXPECT_NE(refusal_of(std::array{thief.get()}).find("bound to another device than eth0"), std::string::npos);
  give_up(thief);  // the device; the port, which two sockets have now, it keeps
  EXPECT_NE(refusal_of(std::array{thief.get()}).find("another socket is bound to its port 5555"), std::string::npos);
  victim = Fd();
  EXPECT_EQ(refusal_of(std::array{thief.get()}), "it was served");
  expect_nothing_attached();
  const Fd later = udp_socket(0);
  const Fd connection = ask(kUser, later.get());
  HarpdReply reply;
  EXPECT_EQ(recv(connection.get(), &reply, sizeof reply, 0), ssize_t(sizeof reply));
  EXPECT_EQ(reply.queues, 1u) << reply.text;
  ASSERT_EQ(setsockopt(later.get(), SOL_SOCKET, SO_BINDTODEVICE, "lo", 2), 0);
  wait_until_closed(connection);
  expect_nothing_attached();
}

// A socket that lingers waits in close(); it is not harpd that waits.
TEST_F(Harpd, WhoPassesADescriptorThatLingersHoldsNobodyUp) {
  const size_t before = contract::open_descriptors();
  const auto since = contract::Clock::now();
  std::deque<Lingering> passed;
  HarpdRequest request;
  std::strcpy(request.interface, "eth0");
  for (const uid_t user : {kOther, kUser, uid_t{0}}) {
    for (const size_t bytes : {sizeof request, size_t{1}}) {
      const Fd connection = ask(user, -1);
      passed.emplace_back().pass(connection.get(), &request, bytes);
      if (bytes == 1) shutdown(connection.get(), SHUT_WR);
    }
  }
  {
    const Fd served = udp_socket(0), twice = ask(kUser, served.get());
    passed.emplace_back().pass(twice.get(), &request, sizeof request);
    wait_until_closed(twice);
  }
  open_by_harpd();
  EXPECT_LT(contract::Clock::now() - since, Lingering::kNotWaited);
  passed.clear();
  contract::expect_no_more_descriptors(before);
}

TEST_F(Harpd, RequestsOfWhoHasHungUpAreDropped) {
  stop();
  listen();
  for (int i = 0; i < 20; ++i) ask(kUser, udp_socket(0).get());
  run();
  open_by_harpd();
  stop();
  EXPECT_EQ(log_.size(), 1u) << "beside the last one " << log_[0];
}

// Without descriptors nobody can be accepted, and poll() goes on to say that somebody waits.
TEST_F(Harpd, WithoutDescriptorsItWaits) {
  const Fd served = udp_socket(0);
  const Fd state(::open(("/proc/self/task/" + std::to_string(thread_) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  std::vector<Fd> all;
  const rlimit few{64, before.rlim_max};
  const Fd late(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  setrlimit(RLIMIT_NOFILE, &few);
  for (Fd one(dup(late.get())); one; one = Fd(dup(late.get()))) all.push_back(std::move(one));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, path_.size());
  EXPECT_EQ(connect(late.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const auto deadline = contract::Clock::now() + contract::kPatience;
  int asleep = 0;  // times that it was seen so, one after the other
  while (asleep < 5 && contract::Clock::now() < deadline) {
    usleep(1000);
    char text[256] = "";
    EXPECT_GT(pread(state.get(), text, sizeof text - 1, 0), 0);
    asleep = std::strstr(text, ") S") ? asleep + 1 : 0;
  }
  EXPECT_EQ(asleep, 5) << "it spins";
  all.clear();
  setrlimit(RLIMIT_NOFILE, &before);
  HarpdRequest request;
  std::strcpy(request.interface, "eth0");
  EXPECT_TRUE(send_with_descriptors(late.get(), &request, sizeof request, std::array{served.get()}));
  HarpdReply reply;
  EXPECT_EQ(recv(late.get(), &reply, sizeof reply, 0), ssize_t(sizeof reply));
  EXPECT_EQ(reply.queues, 1u) << reply.text;
}

TEST_F(Harpd, OneThatEndsAndOneThatComesAtOnce) {
  for (int round = 0; round < 20; ++round) {
    auto first = open_by_harpd();
    std::thread ends([&] { first.reset(); });
    std::thread asks([&] {
      const Fd socket = udp_socket(0);
      refusal_of(std::array{socket.get()});
    });
    ends.join();
    asks.join();
  }
  open_by_harpd();
}

TEST_F(Harpd, QueuesAreSharedOut) {
  stop();
  start(3);
  const auto first = open_by_harpd(kUser, false, 1), second = open_by_harpd(kUser, false, 1);
  const auto other = open(add_host());
  for (XdpPort* port : {first.get(), second.get()}) {
    EXPECT_EQ(send_all(*other, *port, 500, 1000), 500u) << "by whichever queue they come";
    EXPECT_EQ(send_all(*port, *other, 500, 1000), 500u);
  }
  const auto third = open_by_harpd();
  EXPECT_NE(refusal([&] { open_by_harpd(); }).find("all 3 queues"), std::string::npos);
}

TEST_F(Harpd, WhatIsNoRequestEndsTheConnectionAndNothingElse) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, path_.size());
  const auto sends = [&](const void* bytes, size_t count) {
    const Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    send(socket.get(), bytes, count, MSG_NOSIGNAL);
    HarpdReply reply;
    pollfd waiter{socket.get(), POLLIN, 0};
    ASSERT_EQ(poll(&waiter, 1, 5000), 1) << count << " bytes";
    const ssize_t got = recv(socket.get(), &reply, sizeof reply, 0);
    EXPECT_TRUE(got == 0 || (got == sizeof reply && reply.queues == 0)) << got;
  };
  HarpdRequest request;
  std::memset(request.interface, 'x', sizeof request.interface);  // without an end
  sends(&request, sizeof request);
  request.magic = 1;
  sends(&request, sizeof request);
  const std::vector<uint8_t> bytes(3000, 0x41);
  for (const size_t count : {size_t{1}, sizeof request - 1, sizeof request + 1, bytes.size()})
    sends(bytes.data(), count);
  std::vector<Fd> silent;
  for (int i = 0; i < 20; ++i) {
    silent.emplace_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(silent.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  open_by_harpd();
}

TEST_F(Harpd, ItsEndEndsConnectionsOrLetsTheKernelCarryThem) {
  const auto other = open(add_host());
  for (const bool survives : {false, true}) {
    const auto port = open_by_harpd(kUser, survives);
    find_each_other(*port, *other);
    stop();
    expect_nothing_attached();
    if (survives) {
      EXPECT_EQ(send_all(*other, *port, 500, 1000), 500u);
      EXPECT_EQ(send_all(*port, *other, 500, 1000), 500u);
      EXPECT_GT(port->counters().received_by_kernel, 0u);
    } else {
      const auto uses = [&] {
        for (int i = 0; i < 1000; ++i) take(*port);
      };
      EXPECT_NE(refusal(uses).find("harpd, which gave this process its AF_XDP sockets, has ended"), std::string::npos);
      const uint64_t before = port->tx_done();
      EXPECT_EQ(port->tx(std::array{make(other->caps().address, 0, nullptr, 0)}), 1u) << "taken and lost";
      EXPECT_EQ(port->tx_done(), before + 1);
      EXPECT_NE(refusal(uses).find("has ended"), std::string::npos) << "who sends hears why";
      EXPECT_EQ(refusal(uses), "it was served") << "who does not is left alone";
    }
    start();
    EXPECT_NE(refusal([&] { open_by_harpd(); }).find("queue 0 of eth0, which has one already"), std::string::npos)
        << "who was served before keeps its queue";
  }
  open_by_harpd();
}

// HARP_XDP_ROUNDS of them.
TEST_F(Harpd, ManyStartsAndStopsLeaveNothing) {
  const char* wanted = std::getenv("HARP_XDP_ROUNDS");
  const int rounds = wanted ? std::atoi(wanted) : 20;
  const auto other = open(add_host());
  find_each_other(*open_by_harpd(), *other);
  expect_nothing_attached();
  stop();  // it closes what it had of a client a moment after it has detached its program
  start();
  const size_t before = contract::open_descriptors();
  for (int round = 0; round < rounds; ++round) {
    const auto port = open_by_harpd();
    if (round % 10 == 0) find_each_other(*port, *other);
  }
  expect_nothing_attached();
  contract::expect_no_more_descriptors(before);
}

}  // namespace
}  // namespace harp
