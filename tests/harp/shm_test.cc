// The port shm between processes: deaths, stops, leaks, and peers that write nonsense into what they share with us.
#include "harp_plugin/port/shm.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <random>
#include <thread>

#include "harp/lingering.h"
#include "contracts/port_contract.h"
#include "harp_plugin/port/shm_socket.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using contract::Clock;
using contract::kPatience;
using contract::make;
using contract::number_of;
using lightcc::Fd;

// A process that runs `body` until it is killed. Fork before any port is opened: descriptors are inherited.
class Child {
 public:
  explicit Child(const std::function<void(int to_parent, int from_parent)>& body) {
    int up[2];
    int down[2];
    EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(up[0]);
      close(down[1]);
      body(up[1], down[0]);
      _exit(0);
    }
    close(up[1]);
    close(down[0]);
    from_ = Fd(up[0]);
    to_ = Fd(down[1]);
  }
  ~Child() {
    if (pid_ > 0) end(SIGKILL);
  }
  int end(int signal) {
    if (signal) kill(pid_, signal);
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }
  void stop() {
    kill(pid_, SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
  }
  void go_on() { kill(pid_, SIGCONT); }
  Address address() {
    Address address;
    EXPECT_EQ(read(from_.get(), &address, sizeof address), static_cast<ssize_t>(sizeof address));
    return address;
  }
  void tell(const Address& address) {
    EXPECT_EQ(write(to_.get(), &address, sizeof address), static_cast<ssize_t>(sizeof address));
  }

 private:
  pid_t pid_ = -1;
  Fd from_, to_;
};

void tell(int fd, const Address& address) {
  if (write(fd, &address, sizeof address) != sizeof address) _exit(3);
}
Address heard(int fd) {
  Address address;
  if (read(fd, &address, sizeof address) != sizeof address) _exit(4);
  return address;
}

// Receives for a while; calls take for each packet before it is released.
template <class Take>
void pump(Port& port, Take&& take) {
  std::array<RxPacket, 64> got;
  const size_t count = port.rx(got, {});
  for (size_t i = 0; i < count; ++i) take(got[i]);
  port.release(std::span(got).first(count));
  port.tx_done();
}

template <class Condition, class Step>
bool until(Condition&& condition, Step&& step) {
  const auto deadline = Clock::now() + kPatience;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    step();
  }
  return true;
}

// Answers each packet with the same payload, out of what it was lent.
void echo(int to_parent, int) {
  const auto port = open_shm();
  tell(to_parent, port->caps().address);
  while (true) {
    pump(*port, [&](const RxPacket& packet) {
      TxPacket answer = make(packet.from, number_of(packet), packet.payload, packet.payload_bytes);
      port->tx(std::span(&answer, 1));
    });
  }
}

// Sends `number` until its echo comes.
bool echoes(RingPort& port, const Address& to, uint32_t number, const uint8_t* data, uint32_t bytes) {
  bool came = false;
  auto again = Clock::now();
  return until([&] { return came; }, [&] {
    if (Clock::now() >= again) {
      port.tx(std::array{make(to, number, data, bytes)});
      again = Clock::now() + contract::kResend;
    }
    pump(port, [&](const RxPacket& packet) {
      if (number_of(packet) != number) return;
      EXPECT_EQ(packet.payload_bytes, bytes);
      EXPECT_EQ(std::memcmp(packet.payload, data, bytes), 0);
      came = true;
    });
  });
}

std::shared_ptr<Region> filled_region(size_t bytes) {
  auto region = make_region(bytes);
  for (size_t i = 0; i < bytes; ++i) region->data()[i] = contract::pattern(9, i);
  return region;
}

TEST(Shm, PayloadsOfARegionAreNotCopied) {
  Child child(echo);
  const auto port = open_shm();
  const auto region = filled_region(1 << 20);
  port->add_region(region);
  const Address to = child.address();
  for (uint32_t i = 0; i < 50; ++i) ASSERT_TRUE(echoes(*port, to, i, region->data() + 16 * i, port->caps().payload));
  EXPECT_EQ(port->counters().copied, 0u);
  EXPECT_GE(port->counters().referred, 50u);
  const std::vector<uint8_t> plain(region->data(), region->data() + 100'000);
  ASSERT_TRUE(echoes(*port, to, 99, plain.data(), port->caps().payload));
  EXPECT_GE(port->counters().copied, 1u);
}

TEST(Shm, ARemovedRegionIsCopiedFromAgain) {
  Child child(echo);
  const auto port = open_shm();
  const Address to = child.address();
  for (uint32_t i = 0; i < 20; ++i) {  // the peer forgets them too: places are used again
    const auto region = filled_region(1 << 17);
    port->add_region(region);
    ASSERT_TRUE(echoes(*port, to, i, region->data(), 60'000));
    port->remove_region(*region);
    const uint64_t copied = port->counters().copied;
    ASSERT_TRUE(echoes(*port, to, 100 + i, region->data(), 60'000));
    EXPECT_GT(port->counters().copied, copied);
  }
}

TEST(Shm, AKilledPeerLetsGoOfEverythingAndLeavesNothing) {
  {
    const auto warm_up = open_shm();  // whatever a first use opens
  }
  const size_t before = contract::open_descriptors();
  {
    Child child([](int to_parent, int from_parent) {
      const auto port = open_shm();
      tell(to_parent, port->caps().address);
      const Address parent = heard(from_parent);
      const auto region = filled_region(1 << 20);
      port->add_region(region);
      std::vector<RxPacket> lent(64);  // never released
      while (port->rx(lent, {}) == 0) {
      }
      if (fork() == 0) {  // a child of its own outlives it, until the test has ended
        heard(from_parent);
        _exit(0);
      }
      while (true) {
        port->rx(lent, {});
        port->tx(std::array{make(parent, 5, region->data(), 60'000)});
      }
    });
    const auto port = open_shm();
    const auto region = filled_region(1 << 20);
    port->add_region(region);
    const Address to = child.address();
    child.tell(port->caps().address);
    std::vector<TxPacket> packets;
    for (uint32_t i = 0; i < 32; ++i) packets.push_back(make(to, i, region->data(), 60'000));
    uint64_t taken = port->tx(packets);
    RxPacket kept;
    ASSERT_TRUE(until([&] { return port->rx(std::span(&kept, 1), {}) == 1; }, [&] { port->tx_done(); }));
    EXPECT_LT(port->tx_done(), taken);
    EXPECT_TRUE(WIFSIGNALED(child.end(SIGKILL)));
    taken += port->tx(packets);
    EXPECT_TRUE(until([&] { return port->tx_done() == taken; }, [&] { pump(*port, [](const RxPacket&) {}); }));
    // What the dead peer lent is still there.
    EXPECT_EQ(std::memcmp(kept.payload, region->data(), 60'000), 0);
    port->release(std::span(&kept, 1));
    Child other(echo);
    EXPECT_TRUE(echoes(*port, other.address(), 1, region->data(), 1000));
  }
  contract::expect_no_more_descriptors(before);
}

TEST(Shm, PortsThatComeAndGoLeakNoDescriptors) {
  const auto hub = open_shm();
  const std::vector<uint8_t> data(70'000);
  size_t before = 0;
  for (int round = 0; round < 60; ++round) {
    const auto guest = open_shm();
    bool came = false;
    const TxPacket packet = make(hub->caps().address, 1, data.data(), 65'000);
    const TxPacket back = make(guest->caps().address, 2, data.data(), 65'000);
    ASSERT_TRUE(until([&] { return came; }, [&] {
      guest->tx(std::span(&packet, 1));
      hub->tx(std::span(&back, 1));
      pump(*hub, [](const RxPacket&) {});
      pump(*guest, [&](const RxPacket& got) { came = number_of(got) == 2; });
    }));
    if (round == 20) before = contract::open_descriptors();
  }
  until([&] { return contract::open_descriptors() <= before; }, [&] { pump(*hub, [](const RxPacket&) {}); });
  EXPECT_LE(contract::open_descriptors(), before);
}

TEST(Shm, AStoppedPeerKeepsNobodyWaiting) {
  Child stopped(echo);
  Child other(echo);
  const auto port = open_shm();
  const std::vector<uint8_t> data(70'000, 3);
  const Address to = stopped.address();
  const Address to_other = other.address();
  ASSERT_TRUE(echoes(*port, to, 1, data.data(), 60'000));
  stopped.stop();
  for (uint32_t i = 0; i < 3000; ++i) {  // more than slots and frames
    ASSERT_EQ(port->tx(std::array{make(to, 100, data.data(), 60'000)}), 1u);
    if (i % 100 == 0) {
      ASSERT_TRUE(echoes(*port, to_other, 1000 + i, data.data(), 60'000));
    }
  }
  EXPECT_GT(port->counters().lost, 2000u);
  stopped.go_on();
  EXPECT_TRUE(echoes(*port, to, 2, data.data(), 60'000));
}

TEST(Shm, AStoppedPeerThatWasNeverHeardOfTakesPacketsToo) {
  Child stopped(echo);
  const auto port = open_shm();
  const std::vector<uint8_t> data(70'000, 3);
  const Address to = stopped.address();
  stopped.stop();
  for (uint32_t i = 0; i < 2000; ++i) ASSERT_EQ(port->tx(std::array{make(to, 1, data.data(), 60'000)}), 1u);
  stopped.go_on();
  EXPECT_TRUE(echoes(*port, to, 2, data.data(), 60'000));
}

// Memory that nobody has sealed could shrink under a reader.
TEST(Shm, MemoryThatMayShrinkIsRefused) {
  Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 8192), 0);
  EXPECT_FALSE(Mapping::of_peer(fd.get(), 4096, false));
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(Mapping::of_peer(fd.get(), 4096, false));
  EXPECT_FALSE(Mapping::of_peer(fd.get(), 8193, false));
  EXPECT_FALSE(Mapping::of_peer(fd.get(), 0, false));
  EXPECT_FALSE(Mapping::of_peer(STDIN_FILENO, 4096, false));
  EXPECT_FALSE(Mapping::of_peer(-1, 4096, false));
}

// Connects as a sender would, and writes what its dice say into the ring and the announcements.
void hostile_sender(const Address& to, uint64_t seed) {
  std::mt19937_64 random(seed);
  const Region memory(sizeof(PacketRing));
  const Region payloads(1 << 16);
  const Fd bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const Fd socket = connect_to(to);
  if (!socket) return;
  ShmMessage hello{.kind = ShmMessage::kHello, .bytes = memory.bytes()};
  hello.from_size = kShmAddressBytes;
  if (random() % 16 == 0) hello.kind = static_cast<uint32_t>(random() % 5);
  send_message(socket.get(), hello, {memory.descriptor(), bell.get()});
  const ShmMessage region{.kind = ShmMessage::kRegion, .region = payloads.id(), .bytes = payloads.bytes()};
  send_message(socket.get(), region, {payloads.descriptor()});
  auto& ring = *reinterpret_cast<PacketRing*>(memory.data());
  uint64_t tail = 0;
  for (int step = 0; step < 400; ++step) {
    const auto number = static_cast<uint32_t>(random() % 8 == 0 ? random() : random() % kRingSlots);
    PacketSlot& slot = ring.slots[number % kRingSlots];
    slot.header.region = random() % 8 == 0 ? static_cast<uint32_t>(random() % 40) : payloads.id();
    slot.header.offset = random() % 4 ? random() % payloads.bytes() : random();
    slot.header.payload_bytes = static_cast<uint32_t>(random() % 4 ? random() % 2000 : random());
    slot.header.head_bytes = static_cast<uint32_t>(random() % 4 ? 22 + random() % 234 : random());
    if (random() % 4 == 0) slot.header.region = kInline;
    ring.sent_numbers[tail % kRingSlots] = random() % 40 ? number % kRingSlots : number;
    ring.sent.tail.store(random() % 100 ? ++tail : random());
    if (random() % 50 == 0) ring.sent.head.store(random());
    if (random() % 50 == 0) ring.returned.head.store(random());
    if (random() % 50 == 0) ring.returned.tail.store(random());
    if (random() % 100 == 0) ring.armed.store(static_cast<uint32_t>(random()));
    if (random() % 100 == 0) {
      const ShmMessage odd{.kind = static_cast<uint32_t>(random() % 5), .region = static_cast<uint32_t>(random() % 40),
                           .bytes = random() % 2 ? random() : payloads.bytes()};
      send_message(socket.get(), odd, {random() % 2 ? bell.get() : payloads.descriptor()});
    }
    if (step % 100 == 0) usleep(100);
    // Against the reader, after it has looked and before it uses: what a second reading would fall for.
    for (int i = 0; i < 20; ++i) {
      slot.header.head_bytes = i % 2 ? 22 : 0xffffffff;
      slot.header.payload_bytes = i % 2 ? 100 : 0x7fffffff;
      slot.header.offset = i % 2 ? 0 : UINT64_MAX - 50;
    }
  }
}

TEST(ShmHostile, ASenderThatWritesNonsenseHarmsOnlyItself) {
  Child child([](int, int from_parent) {
    const Address to = heard(from_parent);
    for (uint64_t seed = 0; seed < 300; ++seed) hostile_sender(to, seed);
    const auto port = open_shm();  // the end, in good order
    while (true) {
      port->tx(std::array{make(to, 0xe0d, nullptr, 0)});
      port->tx_done();
      usleep(1000);
    }
  });
  Child good(echo);
  const auto port = open_shm();
  child.tell(port->caps().address);
  uint64_t sum = 0;
  bool ended = false;
  uint64_t packets = 0;
  std::vector<RxPacket> kept;
  std::minstd_rand random(1);
  ASSERT_TRUE(until([&] { return ended; }, [&] {
    std::array<RxPacket, 64> got;
    const size_t count = port->rx(got, {});
    for (size_t i = 0; i < count; ++i) {
      ASSERT_GE(got[i].head_bytes, kHeaderBytes);
      ASSERT_LE(got[i].head_bytes, kMostControlBytes + kTagBytes);
      for (const uint8_t byte : contract::bytes_of(got[i])) sum += byte;  // all of it can be read
      ended = ended || number_of(got[i]) == 0xe0d;
      kept.push_back(got[i]);
      ++packets;
    }
    std::shuffle(kept.begin(), kept.end(), random);
    while (kept.size() > 100) {
      port->release(std::span(&kept.back(), 1));
      kept.pop_back();
    }
    port->tx_done();
  }));
  port->release(kept);
  EXPECT_GT(packets, 300u);
  EXPECT_GT(port->counters().malformed + port->counters().broken, 30u);
  const std::vector<uint8_t> data(1000, static_cast<uint8_t>(sum));
  EXPECT_TRUE(echoes(*port, good.address(), 1, data.data(), 1000));
}

TEST(ShmHostile, AReceiverThatWritesNonsenseHarmsOnlyItself) {
  Child child([](int to_parent, int) {
    const Address own = random_shm_address();
    const Fd listener = listen_on(own);
    tell(to_parent, own);
    std::mt19937_64 random(1);
    std::vector<std::pair<Mapping, Fd>> links;
    while (true) {
      bool more = true;
      if (Fd socket = accept_from(listener.get(), &more)) {
        ShmReceived hello;
        if (receive_message(socket.get(), &hello) != Heard::message) continue;
        auto memory = Mapping::of_peer(hello.descriptors[0].get(), sizeof(PacketRing), true);
        if (memory) links.emplace_back(std::move(*memory), std::move(socket));
      }
      if (links.size() > 8) links.erase(links.begin());
      for (const auto& link : links) {
        auto& ring = *reinterpret_cast<PacketRing*>(link.first.data());
        const uint64_t tail = ring.returned.tail;
        ring.returned_numbers[tail % kRingSlots] =
            static_cast<uint32_t>(random() % 20 ? random() % kRingSlots : random());
        ring.returned.tail = random() % 50 ? tail + 1 : random();
        if (random() % 10 == 0) ring.sent.head = random();
        if (random() % 10 == 0) ring.sent.tail = random();
        if (random() % 10 == 0) ring.armed = 1;
        ring.sent_numbers[random() % kRingSlots] = static_cast<uint32_t>(random());
        ring.slots[random() % kRingSlots].header.offset = random();
      }
    }
  });
  Child good(echo);
  const auto port = open_shm();
  const auto region = filled_region(1 << 17);
  port->add_region(region);
  const Address to = child.address();
  const std::vector<uint8_t> plain(65'520, 4);
  uint64_t taken = 0;
  uint64_t done = 0;
  ASSERT_TRUE(until([&] { return port->counters().broken > 200; }, [&] {
    taken += port->tx(std::array{make(to, 1, region->data(), 60'000), make(to, 2, plain.data(), 60'000),
                                 make(to, 3, plain.data(), 100)});
    const uint64_t now_done = port->tx_done();
    ASSERT_GE(now_done, done);
    ASSERT_LE(now_done, taken);
    done = now_done;
    pump(*port, [](const RxPacket&) {});
  }));
  child.end(SIGKILL);
  EXPECT_TRUE(until([&] { return port->tx_done() == taken; }, [&] { pump(*port, [](const RxPacket&) {}); }));
  EXPECT_TRUE(echoes(*port, good.address(), 1, plain.data(), 60'000));  // the pool is whole
}

// A connection as anybody may make it, to the socket of a port.
Fd connect_as(uid_t user, const Address& to) {
  Fd made;
  std::thread([&] {
    syscall(SYS_setresuid, user, user, user);  // of this thread
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    char* at = address.sun_path + 1;
    at += std::snprintf(at, 6, "harp-");
    for (size_t i = 0; i < to.size; ++i) at += std::snprintf(at, 3, "%02x", to.bytes[i]);
    made = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const auto bytes = static_cast<socklen_t>(at - reinterpret_cast<char*>(&address));
    EXPECT_EQ(connect(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes), 0) << std::strerror(errno);
  }).join();
  return made;
}

TEST(Shm, WhoPassesADescriptorThatLingersHoldsNobodyUp) {
  const auto port = open_shm();
  const size_t before = contract::open_descriptors();
  const auto since = Clock::now();
  std::vector<uid_t> users = {geteuid()};
  if (geteuid() == 0) users.push_back(65534);
  ShmMessage hello;
  hello.kind = ShmMessage::kHello;
  for (const uid_t user : users) {
    for (const size_t bytes : {sizeof hello, size_t{1}}) {
      const Fd connection = connect_as(user, port->caps().address);
      Lingering passed;
      passed.pass(connection.get(), &hello, bytes);
      pollfd closed{connection.get(), 0, 0};
      while (poll(&closed, 1, 1) == 0 && Clock::now() - since < Lingering::kNotWaited) port->rx({}, {});
    }
  }
  EXPECT_LT(Clock::now() - since, Lingering::kNotWaited);
  contract::expect_no_more_descriptors(before);
}

}  // namespace
}  // namespace harp
