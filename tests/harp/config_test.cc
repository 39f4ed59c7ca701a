// What the API is made of besides engines: the environment, handles, the stats page.
#include "harp_plugin/api/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "base/error.h"
#include "harp/api_world.h"
#include "harp_plugin/api/handle.h"
#include "harp_plugin/api/stats_page.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

Environment of(std::map<std::string, std::string> values) {
  return [values](const char* name) -> const char* {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : found->second.c_str();
  };
}

std::string refusal(const harp_options* options, const Environment& environment) {
  try {
    read_config(options, environment);
  } catch (const lightcc::Error& error) {
    EXPECT_EQ(error.code(), lightcc::Code::invalid_argument);
    return error.what();
  }
  return "accepted";
}

TEST(HarpConfig, OptionsWinOverTheEnvironmentAndThatOverDefaults) {
  harp_options options{};
  options.size = sizeof options;
  options.port = "shm";
  options.engines = 3;
  const auto environment = of({{"HARP_PORT", "mem"},
                               {"HARP_ENGINES", "2"},
                               {"HARP_PATHS", "4"},
                               {"NCCL_SOCKET_IFNAME", "eth"},
                               {"HARP_STATS", "0"},
                               {"HARP_PEER_TIMEOUT_MS", ""}});
  const Config config = read_config(&options, environment);
  EXPECT_EQ(config.port, "shm");
  EXPECT_EQ(config.engines, 3);
  EXPECT_EQ(config.paths, 4);
  EXPECT_EQ(config.interface, "eth");
  EXPECT_FALSE(config.stats);
  EXPECT_EQ(config.peer_timeout_ms, 4000u) << "empty means not set";
  EXPECT_EQ(read_config(nullptr, environment).port, "mem");
  const Config ports = read_config(nullptr, of({{"HARP_PORT_RANGE", "20000-20100"}}));
  EXPECT_EQ(std::pair(ports.first_port, ports.last_port), std::pair(uint16_t{20000}, uint16_t{20100}));
  EXPECT_EQ(read_config(nullptr, of({{"HARP_PORT_RANGE", "20000"}})).last_port, 20000);
  EXPECT_EQ(read_config(nullptr, of({{"HARP_IFNAME", "ib"}, {"NCCL_SOCKET_IFNAME", "eth"}})).interface, "ib");
}

TEST(HarpConfig, AValueThatCannotBeReadIsNamed) {
  EXPECT_NE(refusal(nullptr, of({{"HARP_ENGINES", "many"}})).find("HARP_ENGINES=many"), std::string::npos);
  EXPECT_NE(refusal(nullptr, of({{"HARP_PATHS", "9"}})).find("HARP_PATHS=9: expected a whole number from 1 to 8"),
            std::string::npos);
  EXPECT_NE(refusal(nullptr, of({{"HARP_GSO", "yes"}})).find("HARP_GSO"), std::string::npos);
  for (const char* range : {"2-1", "0", "1-", "-1", "a-b", "1-65536"})
    EXPECT_NE(refusal(nullptr, of({{"HARP_PORT_RANGE", range}})).find(std::string("HARP_PORT_RANGE=") + range + ": "),
              std::string::npos) << range;
  EXPECT_NE(refusal(nullptr, of({{"HARP_AUTH", "1"}})).find("needs a secret"), std::string::npos);
  harp_options options{};
  EXPECT_NE(refusal(&options, of({})).find("harp_options.size=0"), std::string::npos);
  options.size = sizeof options;
  options.engines = -1;
  EXPECT_NE(refusal(&options, of({})).find("harp_options.engines=-1"), std::string::npos);
}

TEST(HarpConfig, OptionsOfALaterVersionAreTakenIfTheyAskForNothingNew) {
  struct Later {
    harp_options options;
    uint64_t more;
  } later{};
  later.options.size = sizeof later;
  later.options.paths = 2;
  EXPECT_EQ(read_config(&later.options, of({})).paths, 2);
  later.more = 1;
  EXPECT_NE(refusal(&later.options, of({})).find("does not know"), std::string::npos);
}

TEST(HarpConfig, TheTableNamesEveryVariable) {
  const std::string table = knobs_table();
  for (const char* name : {"HARP_PORT", "HARP_IFNAME", "HARP_ENGINES", "HARP_INLINE", "HARP_PATHS", "HARP_MTU",
                           "HARP_PEER_TIMEOUT_MS", "HARP_CONNECT_TIMEOUT_MS", "HARP_AUTH", "HARP_SECRET", "HARP_STATS",
                           "HARP_GSO", "HARP_GRO"})
    EXPECT_NE(table.find(std::string("| `") + name + "` |"), std::string::npos) << name;
}

TEST(HarpOpen, SaysWhichPortsThereAre) {
  harp_options options{};
  options.size = sizeof options;
  options.port = "carrier pigeon";
  harp_context* context = nullptr;
  EXPECT_EQ(harp_open(&options, &context), HARP_INVALID_ARGUMENT);
  EXPECT_EQ(context, nullptr);
  EXPECT_NE(std::strstr(harp_error(), "udp, xdp, shm, mem"), nullptr) << harp_error();
}

TEST(HarpHandle, ReadsWhatItWrote) {
  Handle handle{.port = "udp", .engine = 3, .nonce = {}, .address = {}};
  for (size_t i = 0; i < handle.nonce.size(); ++i) handle.nonce[i] = uint8_t(i + 1);
  handle.address.size = 16;
  for (size_t i = 0; i < 16; ++i) handle.address.bytes[i] = uint8_t(200 + i);
  EXPECT_EQ(read_handle(write_handle(handle), "udp"), handle);
}

struct Directory {
  Directory() {
    char name[] = "/tmp/harp-test-XXXXXX";
    path = mkdtemp(name);
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string path;
};

TEST(StatsPage, ShowsRowsWhileTheyAreUsed) {
  Directory directory;
  {
    StatsPage page(directory.path);
    StatsRow* row = page.take(2, "10.0.0.2:45123");
    ASSERT_NE(row, nullptr);
    row->counters[0] = 77;
    ASSERT_EQ(stats_pages({directory.path}), std::vector<std::string>{page.path()});
    const auto read = read_stats(page.path());
    ASSERT_TRUE(read && read->size() == 1);
    EXPECT_EQ(read->front().peer, "10.0.0.2:45123");
    EXPECT_EQ(read->front().engine, 2u);
    EXPECT_EQ(read->front().pid, uint64_t(getpid()));
    EXPECT_EQ(read->front().counters[0], 77u);
    page.give_back(row);
    EXPECT_TRUE(read_stats(page.path())->empty());
    for (size_t i = 0; i < kStatsRows; ++i) EXPECT_NE(page.take(0, std::string(200, 'x')), nullptr);
    EXPECT_EQ(page.take(0, ""), nullptr);
    EXPECT_EQ(read_stats(page.path())->at(0).peer.size(), 63u);
  }
  EXPECT_TRUE(stats_pages({directory.path}).empty());
}

TEST(StatsPage, WhatDeadProcessesLeftIsRemovedByTheNext) {
  Directory directory;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    StatsPage page(directory.path);
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  std::ofstream(directory.path + "/notes") << "not ours";
  ASSERT_EQ(std::distance(std::filesystem::directory_iterator(directory.path), {}), 2);
  EXPECT_TRUE(stats_pages({directory.path}).empty());
  StatsPage page(directory.path);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path), {}), 2) << "the note and this page";
}

TEST(StatsPage, ADirectoryThatOthersCanWriteToIsRefused) {
  Directory directory;
  chmod(directory.path.c_str(), 0777);
  EXPECT_THROW(StatsPage page(directory.path), lightcc::Error);
  chmod(directory.path.c_str(), 0700);
  const std::string link = directory.path + "/link";
  ASSERT_EQ(symlink(directory.path.c_str(), link.c_str()), 0);
  EXPECT_THROW(StatsPage page(link), lightcc::Error);
}

// Anybody can make /tmp/harp-0 before root does.
TEST(StatsPage, WhereSomebodyElseHasTheNameItGoesElsewhereOrIsLeftOut) {
  Directory taken, free;
  chmod(taken.path.c_str(), 0777);
  testing::internal::CaptureStderr();
  {
    const auto page = make_stats_page({taken.path, free.path});
    ASSERT_TRUE(page);
    EXPECT_TRUE(page->path().starts_with(free.path));
    std::filesystem::copy_file(page->path(), taken.path + "/" + std::to_string(getpid()) + "-77");
    EXPECT_EQ(stats_pages({taken.path, free.path}), std::vector<std::string>{page->path()})
        << "pages of who knows whom are not shown";
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  EXPECT_FALSE(make_stats_page({taken.path, "/proc/none"}));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(taken.path + " is not a directory that only this user can write to"), std::string::npos) << said;
  EXPECT_NE(said.find("creating /proc/none"), std::string::npos) << said;
}

TEST(HarpStats, CountWhatWasSent) {
  World world({.port = "mem"});
  const Link link = world.connect();
  const auto data = pattern(100'000, 1);
  std::vector<uint8_t> got(100'000);
  harp_request* received = receive_from(link.b, got);
  ASSERT_EQ(world.finish(send_to(link.a, data)), HARP_OK);
  ASSERT_EQ(world.finish(received), HARP_OK);
  std::string json(harp_stats(world.a, nullptr, 0), 0);
  ASSERT_LE(harp_stats(world.a, json.data(), json.size()), json.size());
  EXPECT_NE(json.find("\"port\":\"mem\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"messages_sent\":1,"), std::string::npos) << json;
  char little[8];
  EXPECT_GT(harp_stats(world.a, little, sizeof little), sizeof little);
  EXPECT_EQ(std::strlen(little), 7u);
  // The page follows within a tenth of a second, and some rounds.
  const std::string own = "/" + std::to_string(getpid()) + "-";
  EXPECT_EQ(until_done([&] {
    for (const std::string& path : stats_pages()) {
      if (path.find(own) == std::string::npos) continue;
      const auto rows = read_stats(path);
      if (!rows) continue;
      for (const auto& row : *rows)
        if (row.counters[2] >= 100'000 && row.counters[4] == 1) return HARP_OK;
    }
    return HARP_PENDING;
  }), HARP_OK);
}

}  // namespace
}  // namespace harp
