#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "harp_plugin/tools/plugtest/cases.h"
#include "harp_plugin/tools/plugtest/pair.h"

namespace harp::plugtest {

namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

void properties(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  int count = 0;
  expect_ok(plugin.devices(&count), "devices");
  expect(count > 0, "there is no device");
  for (int device = 0; device < count; ++device) {
    nccl::PropertiesV12 is{};
    expect_ok(plugin.properties(device, &is), "getProperties");
    expect(is.name && *is.name, "a device has no name");
    expect(is.pointer_support & nccl::kHostPointers, "memory of the host is not supported");
    expect(is.speed > 0, "the speed is not above 0");
    expect(is.latency > 0, "the latency is not above 0");
    expect(is.max_communicators > 0 && is.max_receives > 0, "no communicators or no receives");
    expect(is.max_receives <= nccl::kMostReceives, "more receives at once than NCCL has");
    expect(is.max_p2p_bytes >= kMiB && is.max_collective_bytes >= kMiB, "the largest message is below 1 MiB");
    expect(is.virtual_device.count == 1 && is.virtual_device.devices[0] == device, "a device is not its own");
  }
  nccl::PropertiesV12 none;
  expect(plugin.properties(count, &none) != nccl::kSuccess, "there are properties of a device too many");
}

void sizes(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  std::vector<size_t> all = {0, 1, 15, 16, 17, 128 * kKiB, kMiB, 4 * kMiB};
  for (size_t mtu : {1500, 3498, 9000}) {
    for (size_t around = mtu - 60; around <= mtu + 1; ++around) all.push_back(around);
  }
  for (size_t bytes : all) pair.transfer(bytes, settings.seed + bytes);
}

void received_size_is_reported(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  for (size_t bytes : {size_t(0), size_t(1), 5 * kKiB, kMiB}) pair.transfer(bytes, settings.seed, 100 * kKiB);
}

void too_long_is_an_error_and_nothing_is_written_beyond(const PlugtestSettings& settings) {
  for (size_t bytes : {size_t(17), 100 * kKiB, kMiB}) {
    const Bytes data = pattern(bytes, settings.seed);
    Bytes got(bytes + 64, 0xee);
    Started plugin(settings.path, settings.version);
    Pair pair(plugin, plugin.context);
    void* received = pair.try_receive(pair.receiver, {{got.data(), bytes / 2}});
    expect(received, "irecv would block on an empty connection");
    void* sent = pair.send(pair.sender, data);
    nccl::Result result = nccl::kSuccess;
    wait_until(
        [&] {
          int done = 0;
          if (sent) plugin.test(sent, &done, nullptr);
          if (done) sent = nullptr;
          result = plugin.test(received, &done, nullptr);
          return done || result != nccl::kSuccess;
        },
        "a receive to end");
    expect(result != nccl::kSuccess, "a message longer than its buffer is no error");
    expect(std::all_of(got.begin() + long(bytes / 2), got.end(), [](uint8_t byte) { return byte == 0xee; }),
           "a message was written beyond its buffer");
  }
}

void outstanding(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  std::mt19937_64 dice(settings.seed);
  for (size_t depth : {size_t(8), size_t(nccl::kMostRequests)}) {
    for (int round = 0; round < 5; ++round) {
      std::vector<Bytes> data, got;
      std::vector<void*> requests;
      for (size_t i = 0; i < depth; ++i) {
        data.push_back(pattern(dice() % (64 * kKiB), dice()));
        got.emplace_back(data.back().size());
      }
      for (size_t i = 0; i < depth; ++i) requests.push_back(pair.receive(pair.receiver, got[i]));
      for (size_t i = 0; i < depth; ++i) requests.push_back(pair.send(pair.sender, data[i]));
      for (const End& end : pair.finish(requests, 1, dice() | 1)) expect_ok(end.result, "test in random order");
      expect(data == got, "messages came changed or in another order");
    }
  }
}

// NCCL posts buffers longer than what comes, and keeps flags in them.
void bytes_behind_a_message_stay(const PlugtestSettings& settings) {
  constexpr size_t kRoom = 256 * kKiB;
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  std::mt19937_64 dice(settings.seed);
  for (int round = 0; round < 10; ++round) {
    std::vector<Bytes> data, got(8, Bytes(kRoom, 0xee));
    std::vector<void*> requests;
    for (size_t i = 0; i < got.size(); ++i)
      data.push_back(pattern(i % 4 == 1 ? data.back().size() : dice() % (i % 4 == 3 ? 3000 : kRoom), dice()));
    for (Bytes& buffer : got) requests.push_back(pair.receive(pair.receiver, buffer));
    for (const Bytes& one : data) requests.push_back(pair.send(pair.sender, one));
    for (const End& end : pair.finish(requests)) expect_ok(end.result, "a message to a longer buffer");
    for (size_t i = 0; i < got.size(); ++i) {
      const auto end = got[i].begin() + static_cast<std::ptrdiff_t>(data[i].size());
      expect(std::equal(data[i].begin(), data[i].end(), got[i].begin()), "a message came changed");
      expect(std::all_of(end, got[i].end(), [](uint8_t byte) { return byte == 0xee; }),
             "bytes behind a message of " + std::to_string(data[i].size()) + " were written");
    }
  }
}

void too_many_requests_would_block(const PlugtestSettings& settings) {
  Bytes buffer(16);  // of all of them: that harms nobody else's messages
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  std::vector<void*> requests;
  for (size_t i = 0; i < 4096; ++i) {
    void* request = pair.try_receive(pair.receiver, {{buffer.data(), buffer.size()}});
    if (!request) break;
    requests.push_back(request);
  }
  expect(requests.size() >= 8 && requests.size() < 4096,
         std::to_string(requests.size()) + " receives began: expected at least 8 and an end");
  const Bytes data(16, 7);
  for (size_t i = 0; i < requests.size(); ++i) {
    void* sent = pair.send(pair.sender, data);
    for (const End& end : pair.finish({requests[i], sent})) expect_ok(end.result, "test");
  }
}

void sizes_may_be_null(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  Bytes got(1000);
  const Bytes data = pattern(got.size(), settings.seed);
  std::vector<void*> requests = {pair.receive(pair.receiver, got), pair.send(pair.sender, data)};
  wait_until(
      [&] {
        for (void*& request : requests) {
          int done = 0;
          if (request) expect_ok(plugin.test(request, &done, nullptr), "test");
          if (done) request = nullptr;
        }
        return !requests[0] && !requests[1];
      },
      "requests to end");
  expect(got == data, "a message came changed");
}

// Tags choose among the buffers of the oldest group; equal tags take them in order.
void grouped_receives(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  nccl::PropertiesV12 is{};
  expect_ok(plugin.properties(0, &is), "getProperties");
  Pair pair(plugin, plugin.context);
  std::mt19937 dice(static_cast<uint32_t>(settings.seed));
  for (int count = 1; count <= is.max_receives; ++count) {
    for (int kinds : {1, 2, count}) {
      std::vector<int> tags, order(static_cast<size_t>(count));
      for (int i = 0; i < count; ++i) tags.push_back(i % kinds + 40);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(tags.begin(), tags.end(), dice);
      std::shuffle(order.begin(), order.end(), dice);
      std::vector<Bytes> got(tags.size(), Bytes(3000)), wanted(tags.size());
      std::vector<std::pair<void*, size_t>> buffers;
      for (Bytes& buffer : got) buffers.push_back({buffer.data(), buffer.size()});
      void* received = pair.try_receive(pair.receiver, buffers, tags);
      expect(received, "irecv would block on an empty connection");
      std::vector<Bytes> data;
      std::vector<int> sent_sizes(tags.size());
      std::vector<bool> taken(tags.size());
      for (int which : order) data.push_back(pattern(100 + 10 * static_cast<size_t>(which), dice()));
      std::vector<void*> sent;
      for (size_t n = 0; n < order.size(); ++n) {
        const int tag = tags[size_t(order[n])];
        size_t place = 0;
        while (taken[place] || tags[place] != tag) ++place;
        taken[place] = true;
        sent_sizes[place] = static_cast<int>(data[n].size());
        wanted[place] = data[n];
        sent.push_back(pair.send(pair.sender, data[n], tag));
      }
      for (const End& end : pair.finish(sent)) expect_ok(end.result, "sending to a group");
      const End end = pair.finish({received}, count)[0];
      expect_ok(end.result, "a grouped receive");
      expect(end.sizes == sent_sizes, "a grouped receive reports wrong sizes");
      for (size_t place = 0; place < got.size(); ++place) got[place].resize(wanted[place].size());
      expect(got == wanted, "a grouped receive mixed up its buffers");
    }
  }
}

void memory_is_registered_while_data_flows(const PlugtestSettings& settings) {
  Started plugin(settings.path, settings.version);
  Pair pair(plugin, plugin.context);
  std::atomic<bool> stop{false};
  std::string fault;
  std::thread service([&] {
    Bytes other(kMiB);
    while (!stop) {
      for (void* communicator : {pair.sender, pair.receiver}) {
        void* memory = nullptr;
        const auto registered =
            plugin.reg_mr(communicator, other.data(), other.size(), nccl::kHostPointers, &memory);
        if (registered != nccl::kSuccess || plugin.dereg_mr(communicator, memory) != nccl::kSuccess)
          fault = "registration failed: " + last_warning();
      }
    }
  });
  try {
    for (uint64_t i = 0; i < 20; ++i) pair.transfer(kMiB, settings.seed + i);
  } catch (...) {
    stop = true;
    service.join();
    throw;
  }
  stop = true;
  service.join();
  expect(fault.empty(), fault);
}

}  // namespace

const std::vector<Case>& message_cases() {
  static const std::vector<Case> all = {
      {"properties", properties},
      {"sizes", sizes},
      {"received-size", received_size_is_reported},
      {"too-long", too_long_is_an_error_and_nothing_is_written_beyond},
      {"outstanding", outstanding},
      {"bytes-behind", bytes_behind_a_message_stay},
      {"too-many", too_many_requests_would_block},
      {"null-sizes", sizes_may_be_null},
      {"grouped", grouped_receives},
      {"registration", memory_is_registered_while_data_flows},
  };
  return all;
}

}  // namespace harp::plugtest
