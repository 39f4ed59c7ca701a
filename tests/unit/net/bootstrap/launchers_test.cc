// Which method finds the rendezvous, by made-up environments, and what each says; PMI with a server in a thread.
#include "net/bootstrap/launchers.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "unit/helpers.h"
#include "net/bootstrap/pmi.h"
#include "net/bootstrap/pmix.h"
#include "unit/variables.h"

namespace lightcc {
namespace {

using Variables = std::map<std::string, std::string>;

Environment from(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

// Rank 1 of 4 on two hosts, as each launcher says it.
const Variables kRun{{"LIGHTCC_JOB_ID", "j7"},
                     {"HOROVOD_RANK", "1"},
                     {"HOROVOD_SIZE", "4"},
                     {"HOROVOD_LOCAL_RANK", "1"},
                     {"HOROVOD_LOCAL_SIZE", "2"}};
const Variables kTorch{
    {"TORCHELASTIC_RUN_ID", "none"}, {"RANK", "1"},         {"WORLD_SIZE", "4"},     {"LOCAL_RANK", "1"},
    {"LOCAL_WORLD_SIZE", "2"},       {"MASTER_ADDR", "h1"}, {"MASTER_PORT", "29500"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                         {"PMIX_NAMESPACE", "prterun-9"}};
const Variables kPmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm{{"SLURM_PROCID", "1"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_JOB_ID", "77"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "0"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                       {"SLURM_STEP_NODELIST", "node[03-04]"},
                       {"SLURM_JOB_NODELIST", "node[01-04]"}};
const Variables kUnknown{{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "4"}};

Variables with(Variables variables, const Variables& changed) {
  for (auto& [name, value] : changed) variables[name] = value;
  return variables;
}
std::optional<Rendezvous> rendezvous_of(const Variables& variables, uint64_t deadline_ns = 0) {
  return find_rendezvous(find_world(from(variables)), read_config(from(variables)), from(variables), 0,
                         deadline_ns ? deadline_ns : in_ms(5000));
}
std::string method_of(const Variables& variables) {
  return rendezvous_method(find_world(from(variables)), read_config(from(variables)), from(variables));
}
std::string refusal_of(const Variables& variables) {
  try {
    rendezvous_of(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "nothing";
}

TEST(Launchers, TheFirstMethodThatFitsIsTaken) {
  const Variables address{{"LIGHTCC_STORE_ADDR", "h1:4711"}}, master{{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}},
      fd{{"PMI_FD", "9"}};
  EXPECT_EQ(method_of(kTorch), "master");
  EXPECT_EQ(method_of(kOpenMpi), "PMIx");
  EXPECT_EQ(method_of(with(kPmi, fd)), "PMI");
  EXPECT_EQ(method_of(kSlurm), "Slurm");
  for (auto& variables : {kRun, kUnknown, kPmi}) EXPECT_EQ(method_of(variables), "");

  for (auto& variables : {kRun, kUnknown, kTorch, kOpenMpi, with(kPmi, fd), kSlurm})
    EXPECT_EQ(method_of(with(variables, address)), "address");
  for (auto& variables : {kRun, kUnknown, kPmi, kSlurm}) EXPECT_EQ(method_of(with(variables, master)), "master");
  // mpirun does not forward it, so that it may be set on some hosts only.
  EXPECT_EQ(method_of(with(kOpenMpi, master)), "PMIx");
  EXPECT_EQ(method_of(with(with(kPmi, fd), master)), "PMI");
}

TEST(Launchers, InsideARankOfLightccrunItsAddressIsNotTaken) {
  const Variables outer{
      {"LIGHTCC_JOB_ID", "j7"}, {"HOROVOD_RANK", "0"}, {"HOROVOD_SIZE", "2"}, {"LIGHTCC_STORE_ADDR", "h1:4711"}};
  EXPECT_EQ(method_of(with(kTorch, outer)), "master");
  EXPECT_EQ(method_of(with(kOpenMpi, outer)), "PMIx");
}

TEST(Launchers, OneHostNeedsNoMethod) {
  for (auto& variables : {with(kRun, {{"HOROVOD_LOCAL_SIZE", "4"}, {"LIGHTCC_STORE_ADDR", "h1:4711"}}),
                          with(kTorch, {{"LOCAL_WORLD_SIZE", "4"}}),
                          with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}), Variables{}}) {
    EXPECT_EQ(method_of(variables), "");
    EXPECT_FALSE(rendezvous_of(variables));
  }
  EXPECT_FALSE(rendezvous_of(kUnknown));  // for all that is known they are on one
}

TEST(Launchers, WithoutAnyMethodItSaysWhatWouldHelp) {
  const std::string text = refusal_of(kRun);
  EXPECT_TRUE(contains(text, "lightccrun started 2 of 4 ranks on host ")) << text;
  for (const char* help : {"LIGHTCC_STORE_ADDR=host:port", "MASTER_ADDR", "mpirun", "PMI_FD", "srun"})
    EXPECT_TRUE(contains(text, help)) << text;
}

TEST(Launchers, AnAddressIsScannedForSixteenPorts) {
  const auto rendezvous = rendezvous_of(with(kRun, {{"LIGHTCC_STORE_ADDR", "h1:4711,[fd00::1]:4711"}}));
  ASSERT_TRUE(rendezvous);
  EXPECT_EQ(rendezvous->endpoints.size(), 32u);
  EXPECT_EQ(text_of(std::vector(rendezvous->endpoints.begin(), rendezvous->endpoints.begin() + 4)),
            "h1:4711,[fd00::1]:4711,h1:4712,[fd00::1]:4712");
  EXPECT_EQ(rendezvous->job, "j7");
  EXPECT_EQ(rendezvous->how, "lightccrun, LIGHTCC_STORE_ADDR");
  EXPECT_FALSE(rendezvous->listener);
  EXPECT_EQ(rendezvous_of(with(kRun, {{"LIGHTCC_STORE_ADDR", "h1:65530"}}))->endpoints.size(), 6u);
}

TEST(Launchers, AnAddressThatIsNoneIsRefused) {
  for (const char* address :
       {"h1", "h1:", ":4711", "h1:0", "h1:65536", "h1:x", "fd00::1:4711", "[fd00::1]", "h1:1,,"}) {
    const std::string text = refusal_of(with(kRun, {{"LIGHTCC_STORE_ADDR", address}}));
    EXPECT_TRUE(contains(text, std::string("LIGHTCC_STORE_ADDR=") + address)) << text;
  }
}

TEST(Launchers, MastersPortIsLeftToTorch) {
  const auto rendezvous = rendezvous_of(kTorch);
  EXPECT_EQ(rendezvous->endpoints.size(), 16u);
  EXPECT_EQ(rendezvous->endpoints[0].host, "h1");
  EXPECT_EQ(rendezvous->endpoints[0].port, 29501);
  EXPECT_EQ(rendezvous->endpoints[15].port, 29516);
  EXPECT_TRUE(contains(refusal_of(with(kTorch, {{"MASTER_PORT", "x"}})), "MASTER_PORT"));
  EXPECT_TRUE(contains(refusal_of(with(kTorch, {{"MASTER_PORT", "65535"}})), "MASTER_PORT"));
}

TEST(Launchers, SlurmMeetsAtTheStepsFirstHost) {
  const auto rendezvous = rendezvous_of(kSlurm);
  EXPECT_EQ(rendezvous->endpoints.size(), 16u);
  EXPECT_EQ(rendezvous->endpoints[0].host, "node03");
  EXPECT_EQ(rendezvous->endpoints[0].port, 20000 + 77 * 16);
  EXPECT_EQ(rendezvous->job, "slurm-77.0");
  for (const Variables& other : {Variables{{"SLURM_STEP_ID", "1"}}, Variables{{"SLURM_JOB_ID", "78"}}}) {
    const auto next = rendezvous_of(with(kSlurm, other));
    EXPECT_GE(std::abs(next->endpoints[0].port - rendezvous->endpoints[0].port), 16);
    EXPECT_NE(next->job, rendezvous->job);
  }
  const int last = rendezvous_of(with(kSlurm, {{"SLURM_JOB_ID", "4294967295"}}))->endpoints[15].port;
  EXPECT_GE(last, 20000 + 15);
  EXPECT_LT(last, 40016);
}

TEST(Launchers, ARangeOfPortsReplacesThoseOfTheMethod) {
  for (auto& variables : {kTorch, kSlurm}) {
    const auto rendezvous = rendezvous_of(with(variables, {{"LIGHTCC_PORT_RANGE", "21000-21003"}}));
    EXPECT_EQ(rendezvous->endpoints.size(), 4u);
    EXPECT_EQ(rendezvous->endpoints[0].port, 21000);
  }
  EXPECT_EQ(rendezvous_of(with(kTorch, {{"LIGHTCC_PORT_RANGE", "20000-30000"}}))->endpoints.size(), 64u);
  EXPECT_EQ(rendezvous_of(with(kTorch, {{"LIGHTCC_PORT_RANGE", "0"}}))->endpoints[0].port, 29501);
  EXPECT_TRUE(contains(refusal_of(with(kTorch, {{"LIGHTCC_PORT_RANGE", "2-1"}})), "LIGHTCC_PORT_RANGE"));
}

TEST(Launchers, RankZeroTakesTheNextPortIfOneIsTaken) {
  Fd taken;
  int port = 0;
  for (port = 23000; !taken; ++port)  // with a free one behind it
    try {
      taken = listen_on(any_address(), {port, port});
    } catch (const Error&) {
    }
  --port;
  const auto rendezvous =
      rendezvous_of(with(kRun, {{"HOROVOD_RANK", "0"}, {"LIGHTCC_STORE_ADDR", "127.0.0.1:" + std::to_string(port)}}));
  ASSERT_TRUE(rendezvous->listener);
  EXPECT_GT(rendezvous->endpoints.at(0).port, port);
  EXPECT_LE(rendezvous->endpoints.at(0).port, port + 15);
  EXPECT_EQ(rendezvous->endpoints.size(), 1u);
  auto others = rendezvous_of(with(kRun, {{"LIGHTCC_STORE_ADDR", "127.0.0.1:" + std::to_string(port)}}));
  EXPECT_TRUE(contains(text_of(others->endpoints), text_of(rendezvous->endpoints)));
}

TEST(Launchers, SecretsAreSharedByWhoSharesTheJob) {
  EXPECT_EQ(rendezvous_of(kTorch)->secret, rendezvous_of(with(kTorch, {{"RANK", "2"}}))->secret);
  EXPECT_NE(rendezvous_of(kTorch)->secret, rendezvous_of(with(kTorch, {{"MASTER_PORT", "29600"}}))->secret);
  EXPECT_EQ(rendezvous_of(with(kTorch, {{"LIGHTCC_SECRET", "s"}}))->secret, "s");
  EXPECT_EQ(rendezvous_of(with(kTorch, {{"HOROVOD_SECRET_KEY", "k"}}))->secret, "k");
  EXPECT_EQ(rendezvous_of(with(kTorch, {{"HOROVOD_SECRET_KEY", "k"}, {"LIGHTCC_SECRET", "s"}}))->secret, "s");
  // Without an id from the launcher the job is named alike on all hosts, however they call rank 0's.
  Variables one = with(kUnknown, {{"LIGHTCC_STORE_ADDR", "h1:4711"}}), two = one;
  two["LIGHTCC_STORE_ADDR"] = "10.0.0.1:4711";
  EXPECT_EQ(rendezvous_of(one)->job, rendezvous_of(two)->job);
  two["LIGHTCC_STORE_ADDR"] = "h1:4712";
  EXPECT_NE(rendezvous_of(one)->job, rendezvous_of(two)->job);
}

TEST(Launchers, ASubsetNeedsItsFirstRankWhereRanksMeet) {
  const World world = find_world(from(kTorch));
  auto rendezvous_from = [&](const std::string& master, const std::vector<int>& ranks) {
    const Variables variables = with(kTorch, {{"MASTER_ADDR", master}, {"MASTER_PORT", "23900"}});
    return find_rendezvous(subset(world, ranks), Config{}, from(variables), 0, in_ms(1000));
  };
  EXPECT_TRUE(rendezvous_from("127.0.0.1", {1, 2})->listener);
  // Its first rank is elsewhere and answers for itself.
  EXPECT_NE(rendezvous_from("192.0.2.77", {0, 1})->job, world.job);
  try {
    rendezvous_from("198.51.100.77", {1, 2});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "init(comm=[1, 2]): its first rank, 1, is on host ")) << error.what();
  }
}

// mpiexec's side of PMI-1 for a few processes, as MPICH's proxy speaks.
class Server {
 public:
  Server(int processes, int value_bytes) : processes_(processes), value_bytes_(value_bytes) {
    for (int i = 0; i < processes; ++i) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      ours_.emplace_back(ends[0]), theirs_.emplace_back(ends[1]);
    }
    for (Fd& fd : ours_) threads_.emplace_back([this, &fd] { serve(fd.get()); });
  }
  ~Server() {
    for (Fd& fd : theirs_) shutdown(fd.get(), SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
  }
  int fd(int process) const { return theirs_[size_t(process)].get(); }
  size_t values() const { return values_.size(); }

 private:
  static std::string field(const std::string& line, const std::string& name) {
    const size_t at = line.find(" " + name + "=");
    if (at == std::string::npos) return "";
    const size_t from = at + name.size() + 2;
    return line.substr(from, line.find(' ', from) - from);
  }
  std::string answer(const std::string& line) {
    std::unique_lock lock(mutex_);
    const std::string command = line.substr(0, line.find(' '));
    if (command == "cmd=init") return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2";
    if (command == "cmd=get_maxes")
      return "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=" + std::to_string(value_bytes_);
    if (command == "cmd=get_my_kvsname") return "cmd=my_kvsname rc=0 kvsname=kvs_1_0";
    if (command == "cmd=put") {
      const std::string value = field(line, "value");
      if (value.empty() || int(value.size()) >= value_bytes_) return "cmd=put_result rc=-1 msg=value_too_long";
      return values_[field(line, "key")] = value, "cmd=put_result rc=0 msg=success";
    }
    if (command == "cmd=barrier_in") {
      const int turn = (inside_ + processes_) / processes_;
      ++inside_;
      changed_.notify_all();
      changed_.wait_for(lock, std::chrono::seconds(20), [&] { return inside_ >= turn * processes_ || leaving_; });
      return "cmd=barrier_out rc=0";
    }
    if (command == "cmd=get") {
      auto found = values_.find(field(line, "key"));
      return found == values_.end() ? "cmd=get_result rc=-1" : "cmd=get_result rc=0 msg=success value=" + found->second;
    }
    return "cmd=unknown rc=-1";
  }
  void serve(int fd) {
    std::string heard;
    char bytes[1000];
    for (ssize_t n; (n = recv(fd, bytes, sizeof bytes, 0)) > 0;) {
      heard.append(bytes, size_t(n));
      for (size_t end; (end = heard.find('\n')) != std::string::npos; heard.erase(0, end + 1)) {
        const std::string reply = answer(heard.substr(0, end)) + "\n";
        if (reply.starts_with("cmd=barrier_out") && leaving_) return;
        // In two parts, as a stream may bring it.
        send(fd, reply.data(), 3, MSG_NOSIGNAL);
        send(fd, reply.data() + 3, reply.size() - 3, MSG_NOSIGNAL);
      }
    }
    std::lock_guard lock(mutex_);
    leaving_ = true;
    changed_.notify_all();
  }

  const int processes_, value_bytes_;
  std::vector<Fd> ours_, theirs_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  int inside_ = 0;
  std::atomic<bool> leaving_{false};
};

TEST(Pmi, ANoteReachesAll) {
  for (int value_bytes : {16, 64, 1024})
    for (size_t length : {size_t(0), size_t(1), size_t(13), size_t(15), size_t(1000)}) {
      Server server(3, value_bytes);
      const std::string note(length, 'n');
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i)
        threads.emplace_back([&, i] {
          for (const char* key : {"k0", "k1"}) {
            const PmiNote got =
                broadcast_by_pmi(server.fd(i), key, i ? std::nullopt : std::optional(note + key), in_ms(20'000));
            EXPECT_EQ(got.note, note + key);
            EXPECT_EQ(got.kvs_name, "kvs_1_0");
          }
        });
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(server.values() > 100, length == 1000 && value_bytes == 16);
    }
}

TEST(Pmi, FailuresAreNamed) {
  auto failure_of = [](int fd, uint64_t ms, std::optional<std::string> note = std::nullopt) {
    try {
      broadcast_by_pmi(fd, "k", note, in_ms(ms));
    } catch (const Error& error) {
      return std::pair(error.code(), std::string(error.what()));
    }
    return std::pair(Code::ok, std::string());
  };
  {
    Server server(2, 64);  // the other process does not come
    const auto [code, text] = failure_of(server.fd(0), 200, "n");
    EXPECT_EQ(code, Code::timeout);
    EXPECT_TRUE(contains(text, "not all processes that mpiexec started called init")) << text;
  }
  {
    Server server(1, 64);  // nobody brings a note
    const auto [code, text] = failure_of(server.fd(0), 5000);
    EXPECT_EQ(code, Code::internal);
    EXPECT_TRUE(contains(text, "answered 'cmd=get_result rc=-1' to 'get kvsname=kvs_1_0 key=k.0'")) << text;
  }
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  Fd ours(ends[0]), theirs(ends[1]);
  EXPECT_TRUE(contains(failure_of(theirs.get(), 100).second, "did not answer")) << "a silent server";
  ours = Fd();
  const auto [code, text] = failure_of(theirs.get(), 5000);
  EXPECT_EQ(code, Code::internal);
  EXPECT_TRUE(contains(text, "is MPI finalized already?") && contains(text, "LIGHTCC_STORE_ADDR")) << text;
}

TEST(Pmi, RanksMeetThroughIt) {
  Server server(2, 64);
  std::vector<std::thread> threads;
  std::vector<std::string> secrets(2);
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      const Variables variables{
          {"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "2"}, {"PMI_FD", std::to_string(server.fd(rank))}};
      auto rendezvous = rendezvous_of(variables, in_ms(20'000));
      ASSERT_TRUE(rendezvous);
      secrets[size_t(rank)] = rendezvous->secret;
      auto exchange = open_exchange(rank, 2, {rendezvous->job, "1", rendezvous->secret, 0}, rendezvous->endpoints,
                                 std::move(rendezvous->listener));
      EXPECT_EQ(exchange->exchange("note", in_ms(20'000)).size(), 2u);
      const std::string text = describe(*rendezvous, *exchange);
      EXPECT_EQ(text.find("PMI at "), 0u) << text;
      EXPECT_FALSE(contains(text, rendezvous->secret));
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(secrets[0].size(), 32u);
  EXPECT_EQ(secrets[0], secrets[1]);
}

TEST(Pmi, ASecretOfTheUsersMustBeEverywhere) {
  Server server(2, 64);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      Variables variables{
          {"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "2"}, {"PMI_FD", std::to_string(server.fd(rank))}};
      if (rank == 0) {
        variables["LIGHTCC_SECRET"] = "s";
        EXPECT_EQ(rendezvous_of(variables)->secret, "s");
      } else {
        EXPECT_TRUE(contains(refusal_of(variables), "rank 0 has LIGHTCC_SECRET and rank 1 on host "));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Pmix, WithoutItsLibraryItSaysWhatToDo) {
  for (PmixClient how : {PmixClient::child, PmixClient::itself}) {
    try {
      broadcast_by_pmix("/no/such/libpmix.so.2", how, "k", {0, 1}, std::nullopt, in_ms(20'000));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::internal);
      EXPECT_TRUE(contains(error.what(), "/no/such/libpmix.so.2")) << error.what();
      EXPECT_TRUE(contains(error.what(), "set LIGHTCC_STORE_ADDR=host:port")) << error.what();
    }
  }
}

TEST(Pmix, TheLibraryIsTheAncestors) {
  EXPECT_EQ(pmix_library(1), "libpmix.so.2");  // nothing but init above us
}

}  // namespace
}  // namespace lightcc
