// Ranks that are threads and call MPI's functions, as JAX would in a process each.
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "api/global_state.h"
#include "api/lightcc.h"
#include "api/mpiabi/abi.h"
#include "api/mpiabi/process.h"
#include "unit/ranks.h"

namespace lightcc::test {

inline thread_local GlobalState* own_state = nullptr;
inline thread_local mpiabi::Process* own_process = nullptr;

class MpiRanks {
 public:
  explicit MpiRanks(int n, Config config = {}) : ranks_(n, std::move(config)) {
    global_state_of_thread = [] { return own_state; };
    mpiabi::process_of_thread = [] { return own_process; };
    for (int rank = 0; rank < n; ++rank) {
      states_.push_back(std::make_unique<GlobalState>());
      states_.back()->engine = std::shared_ptr<Engine>(&ranks_[rank], [](Engine*) {});
      processes_.push_back(std::make_unique<mpiabi::Process>());
    }
    each([](int) {
      int provided = -1;
      EXPECT_EQ(MPIABI_Init_thread(nullptr, nullptr, MPIABI_THREAD_FUNNELED, &provided), MPIABI_SUCCESS);
      EXPECT_EQ(provided, MPIABI_THREAD_MULTIPLE);
    });
  }
  ~MpiRanks() {
    global_state_of_thread = nullptr;
    mpiabi::process_of_thread = nullptr;
  }
  Engine& operator[](int rank) { return ranks_[rank]; }

  // The calling thread is one of this rank's.
  void become(int rank) { own_state = states_[size_t(rank)].get(), own_process = processes_[size_t(rank)].get(); }
  void each(const std::function<void(int rank)>& body) {
    ranks_.each([&](Engine&, int rank) { become(rank), body(rank); });
  }

 private:
  Ranks ranks_;
  std::vector<std::unique_ptr<GlobalState>> states_;
  std::vector<std::unique_ptr<mpiabi::Process>> processes_;
};

inline std::string error_text() {
  char text[mpiabi::kMostErrorCharacters];
  int length = -1;
  EXPECT_EQ(MPIABI_Error_string(1, text, &length), MPIABI_SUCCESS);
  EXPECT_EQ(size_t(length), std::string(text).size());
  return text;
}

// For calls that must succeed.
inline void ok(int code) { ASSERT_EQ(code, MPIABI_SUCCESS) << error_text(); }

inline MPIABI_Comm split(MPIABI_Comm from, int colour, int key) {
  MPIABI_Comm made = MPIABI_COMM_NULL;
  ok(MPIABI_Comm_split(from, colour, key, &made));
  return made;
}
inline int rank_in(MPIABI_Comm communicator) {
  int rank = -1;
  ok(MPIABI_Comm_rank(communicator, &rank));
  return rank;
}
inline int size_of_communicator(MPIABI_Comm communicator) {
  int size = -1;
  ok(MPIABI_Comm_size(communicator, &size));
  return size;
}

// The numbers of all its members, by their rank there.
inline std::vector<int32_t> gathered(MPIABI_Comm communicator, int32_t number) {
  std::vector<int32_t> all(size_t(size_of_communicator(communicator)));
  ok(MPIABI_Allgather(&number, 1, MPIABI_INT32_T, all.data(), 1, MPIABI_INT32_T, communicator));
  return all;
}

}  // namespace lightcc::test
