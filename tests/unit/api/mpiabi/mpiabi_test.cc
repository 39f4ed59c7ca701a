// MPI's functions as JAX calls them: every operation and datatype against plain arithmetic, communicators, and what
// goes wrong.
#include <complex>
#include <cstring>
#include <numeric>

#include "unit/api/mpiabi/mpi_ranks.h"

extern "C" void MPIABI_Bcast();  // of the names that JAX never calls

LABEL(on_hosts);
LABEL(alone, "MpiAbi.AFunctionThatIsNotCarriedEndsTheProgram");

namespace lightcc::test {
namespace {

// Some numbers of a rank, small enough that products of four fit in 8 bits, and for unsigned types beyond the signed
// range, where their minimum is another.
template <class T> std::vector<T> numbers_of(int rank, int count) {
  std::vector<T> numbers;
  for (int i = 0; i < count; ++i) {
    const int small = 1 + (i + rank) % 3;
    const bool large = std::is_unsigned_v<T> && i % 4 == rank;
    numbers.push_back(large ? T(std::numeric_limits<T>::max() - T(small)) : T(small));
  }
  return numbers;
}

template <class T> T combined(MPIABI_Op op, T one, T other) {
  if (op == MPIABI_SUM) return T(one + other);
  if (op == MPIABI_PROD) return T(one * other);
  return op == MPIABI_MIN ? std::min(one, other) : std::max(one, other);
}

template <class T> std::vector<T> expected(MPIABI_Op op, int ranks, int count) {
  std::vector<T> all = numbers_of<T>(0, count);
  for (int rank = 1; rank < ranks; ++rank) {
    const std::vector<T> theirs = numbers_of<T>(rank, count);
    for (size_t i = 0; i < all.size(); ++i) all[i] = combined(op, all[i], theirs[i]);
  }
  return all;
}

template <class T> void expect_reductions(MPIABI_Datatype type, int rank, int ranks) {
  constexpr int kEach = 5;
  const int count = kEach * ranks;
  const std::vector<T> sent = numbers_of<T>(rank, count);
  const std::vector<int> counts(size_t(ranks), kEach);
  for (MPIABI_Op op : {MPIABI_SUM, MPIABI_PROD, MPIABI_MIN, MPIABI_MAX}) {
    SCOPED_TRACE("type " + std::to_string(type) + ", operation " + std::to_string(op));
    const std::vector<T> whole = expected<T>(op, ranks, count);
    std::vector<T> got(sent.size()), in_place = sent, part(kEach);
    ok(MPIABI_Allreduce(sent.data(), got.data(), count, type, op, MPIABI_COMM_WORLD));
    EXPECT_EQ(got, whole);
    ok(MPIABI_Allreduce(in_place.data(), in_place.data(), count, type, op, MPIABI_COMM_WORLD));
    EXPECT_EQ(in_place, whole);
    ok(MPIABI_Reduce_scatter(sent.data(), part.data(), counts.data(), type, op, MPIABI_COMM_WORLD));
    EXPECT_EQ(part, std::vector<T>(whole.begin() + rank * kEach, whole.begin() + (rank + 1) * kEach));
  }
  std::vector<T> all(sent.size() * size_t(ranks)), theirs;
  ok(MPIABI_Allgather(sent.data(), count, type, all.data(), count, type, MPIABI_COMM_WORLD));
  for (int other = 0; other < ranks; ++other) {
    const std::vector<T> one = numbers_of<T>(other, count);
    theirs.insert(theirs.end(), one.begin(), one.end());
  }
  EXPECT_EQ(all, theirs);
}

TEST(MpiAbi, EveryDatatypeAndOperation) {
  for (int n : {1, 2, 3}) {
    MpiRanks ranks(n);
    ranks.each([&](int rank) {
      expect_reductions<int8_t>(MPIABI_INT8_T, rank, n);
      expect_reductions<uint8_t>(MPIABI_UINT8_T, rank, n);
      expect_reductions<int16_t>(MPIABI_INT16_T, rank, n);
      expect_reductions<uint16_t>(MPIABI_UINT16_T, rank, n);
      expect_reductions<int32_t>(MPIABI_INT32_T, rank, n);
      expect_reductions<uint32_t>(MPIABI_UINT32_T, rank, n);
      expect_reductions<int64_t>(MPIABI_INT64_T, rank, n);
      expect_reductions<uint64_t>(MPIABI_UINT64_T, rank, n);
      expect_reductions<float>(MPIABI_FLOAT, rank, n);
      expect_reductions<double>(MPIABI_DOUBLE, rank, n);
    });
  }
}

TEST(MpiAbi, ComplexNumbersAreAdded) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    const std::vector<std::complex<double>> sent{{1.0 + rank, 2.0}, {0.5, -1.0 * rank}};
    std::vector<std::complex<double>> got(2), part(1);
    ok(MPIABI_Allreduce(sent.data(), got.data(), 2, MPIABI_C_DOUBLE_COMPLEX, MPIABI_SUM, MPIABI_COMM_WORLD));
    EXPECT_EQ(got, (std::vector<std::complex<double>>{{3, 4}, {1, -1}}));
    const std::complex<float> single(float(rank), 1);
    std::complex<float> sum;
    ok(MPIABI_Allreduce(&single, &sum, 1, MPIABI_C_COMPLEX, MPIABI_SUM, MPIABI_COMM_WORLD));
    EXPECT_EQ(sum, std::complex<float>(1, 2));
    const int counts[] = {1, 1};
    ok(MPIABI_Reduce_scatter(sent.data(), part.data(), counts, MPIABI_C_DOUBLE_COMPLEX, MPIABI_SUM,
                             MPIABI_COMM_WORLD));
    EXPECT_EQ(part[0], got[size_t(rank)]);
    EXPECT_NE(MPIABI_Allreduce(&single, &sum, 1, MPIABI_C_COMPLEX, MPIABI_PROD, MPIABI_COMM_WORLD), MPIABI_SUCCESS);
    EXPECT_NE(error_text().find("a product of complex64 numbers: lightcc adds complex numbers"), std::string::npos);
    ok(MPIABI_Allreduce(&single, &sum, 1, MPIABI_C_COMPLEX, MPIABI_SUM, MPIABI_COMM_WORLD));
  });
}

TEST(MpiAbi, EveryThreadIsTheMainOne) {
  int flag = 0;
  ok(MPIABI_Is_thread_main(&flag));
  EXPECT_EQ(flag, 1);
}

TEST(MpiAbi, ACommunicatorHasItsOwnOrder) {
  MpiRanks ranks(3);
  ranks.each([&](int rank) {
    const MPIABI_Comm backwards = split(MPIABI_COMM_WORLD, 0, -rank);
    EXPECT_EQ(rank_in(backwards), 2 - rank);
    EXPECT_EQ(gathered(backwards, rank), (std::vector<int32_t>{2, 1, 0}));
    std::vector<int32_t> sent{100, 200, 300}, part(1);
    const int counts[] = {1, 1, 1};
    ok(MPIABI_Reduce_scatter(sent.data(), part.data(), counts, MPIABI_INT32_T, MPIABI_SUM, backwards));
    EXPECT_EQ(part[0], 3 * sent[size_t(rank_in(backwards))]);
    EXPECT_EQ(sent, (std::vector<int32_t>{100, 200, 300}));
  });
}

TEST(MpiAbi, SplitsOfSplits) {
  MpiRanks ranks(4);
  ranks.each([&](int rank) {
    const MPIABI_Comm half = split(MPIABI_COMM_WORLD, rank / 2, rank);
    EXPECT_EQ(gathered(half, rank), (rank < 2 ? std::vector<int32_t>{0, 1} : std::vector<int32_t>{2, 3}));
    const MPIABI_Comm none = split(MPIABI_COMM_WORLD, rank == 1 ? MPIABI_UNDEFINED : 5, rank);
    EXPECT_EQ(none == MPIABI_COMM_NULL, rank == 1);
    if (rank != 1) {
      EXPECT_EQ(gathered(none, rank), (std::vector<int32_t>{0, 2, 3}));
    }
    const MPIABI_Comm alone = split(half, rank_in(half), 0);
    EXPECT_EQ(gathered(alone, rank), std::vector<int32_t>{rank});
    const MPIABI_Comm turned = split(half, 0, -rank);
    EXPECT_EQ(gathered(turned, rank), (rank < 2 ? std::vector<int32_t>{1, 0} : std::vector<int32_t>{3, 2}));
  });
}

TEST(MpiAbi, TheSameRanksHaveOneGroup) {
  MpiRanks ranks(3);
  ranks.each([&](int rank) {
    for (int i = 0; i < 5; ++i) {
      MPIABI_Comm pair = split(MPIABI_COMM_WORLD, rank == 2, (i % 2 ? 1 : -1) * rank);
      gathered(pair, rank);
      if (i == 2) continue;  // one is kept
      ok(MPIABI_Comm_free(&pair));
      EXPECT_EQ(pair, MPIABI_COMM_NULL);
    }
    EXPECT_EQ(lightcc_group_ids(nullptr, 0), 2) << "the world, and ranks 0 and 1";
  });
}

TEST(MpiAbi, WithoutRoomGroupsOfFreedCommunicatorsGo) {
  MpiRanks ranks(3);
  ranks.each([&](int rank) {
    const MPIABI_Comm kept = split(MPIABI_COMM_WORLD, rank == 2, rank);
    MPIABI_Comm freed = split(MPIABI_COMM_WORLD, rank == 0, rank);
    ok(MPIABI_Comm_free(&freed));
    const int32_t members[] = {0, 1};
    while (lightcc_add_group(members, 2) > 0) {  // the program's own
    }
    const MPIABI_Comm made = split(MPIABI_COMM_WORLD, rank == 1, rank);
    EXPECT_EQ(gathered(made, rank), (rank == 1 ? std::vector<int32_t>{1} : std::vector<int32_t>{0, 2}));
    EXPECT_EQ(gathered(kept, rank), (rank == 2 ? std::vector<int32_t>{2} : std::vector<int32_t>{0, 1}));
  });
}

TEST(MpiAbi, ThreadsUseCommunicatorsAtTheSameTime) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    std::vector<MPIABI_Comm> communicators;
    for (int i = 0; i < 3; ++i) communicators.push_back(split(MPIABI_COMM_WORLD, 0, rank));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < communicators.size(); ++i)
      threads.emplace_back([&, i, rank] {
        ranks.become(rank);
        for (int turn = 0; turn < 100; ++turn) {
          const int32_t own = int32_t(i) * 1000 + turn + rank;
          EXPECT_EQ(gathered(communicators[i], own), (std::vector<int32_t>{own - rank, own - rank + 1}));
          int32_t sum = 0;
          ok(MPIABI_Allreduce(&own, &sum, 1, MPIABI_INT32_T, MPIABI_SUM, communicators[i]));
          EXPECT_EQ(sum, 2 * (own - rank) + 1);
        }
      });
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(MpiAbi, BadCallsAreRefusedAndTheNextWorks) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    float x = 1, y = 0;
    const auto expect_refused = [&](int code, const std::string& text) {
      EXPECT_EQ(code, LIGHTCC_INVALID_ARGUMENT);
      EXPECT_NE(error_text().find(text), std::string::npos) << error_text();
    };
    expect_refused(MPIABI_Allreduce(&x, &y, -2, MPIABI_FLOAT, MPIABI_SUM, MPIABI_COMM_WORLD),
                   "2^31 or more elements of float32");
    expect_refused(MPIABI_Allreduce(&x, &y, 1, 77, MPIABI_SUM, MPIABI_COMM_WORLD), "datatype 77");
    expect_refused(MPIABI_Allreduce(&x, &y, 1, MPIABI_FLOAT, 77, MPIABI_COMM_WORLD), "operation 77");
    const int unequal[] = {1, 2};
    expect_refused(MPIABI_Reduce_scatter(&x, &y, unequal, MPIABI_FLOAT, MPIABI_SUM, MPIABI_COMM_WORLD), "unequal");
    MPIABI_Comm freed = split(MPIABI_COMM_WORLD, 0, rank);
    const MPIABI_Comm stale = freed;
    ok(MPIABI_Comm_free(&freed));
    expect_refused(MPIABI_Allgather(&x, 1, MPIABI_FLOAT, &y, 1, MPIABI_FLOAT, stale), "it was freed");
    MPIABI_Comm twice = stale;
    expect_refused(MPIABI_Comm_free(&twice), "it was freed");
    ok(MPIABI_Allreduce(&x, &y, 1, MPIABI_FLOAT, MPIABI_SUM, MPIABI_COMM_WORLD));
    EXPECT_EQ(y, 2);
  });
}

TEST(MpiAbi, ADisagreementNamesOperationAndRanks) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    std::vector<float> x(2), y(4);
    EXPECT_EQ(MPIABI_Allgather(x.data(), 1 + rank, MPIABI_FLOAT, y.data(), 1 + rank, MPIABI_FLOAT, MPIABI_COMM_WORLD),
              LIGHTCC_MISMATCH);
    EXPECT_EQ(error_text(),
              "allgather of tensor 'jax.0.0 of ranks 0, 1': ranks disagree on shape: rank 0 has [any, 4], "
              "rank 1 has [any, 8]");
    EXPECT_EQ(gathered(MPIABI_COMM_WORLD, rank), (std::vector<int32_t>{0, 1}));
  });
}

TEST(MpiAbi, TheEndOfTheWorldIsSaidByEveryHandle) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    const MPIABI_Comm before = split(MPIABI_COMM_WORLD, 0, rank);
    if (rank == 1) return void(lightcc_shutdown_because("it ended with ValueError: bad batch"));
    int32_t number = 1, sum = 0;
    MPIABI_Comm made = MPIABI_COMM_NULL;
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(MPIABI_Allreduce(&number, &sum, 1, MPIABI_INT32_T, MPIABI_SUM, before), LIGHTCC_SHUT_DOWN);
      EXPECT_NE(error_text().find("has left (it ended with ValueError: bad batch)"), std::string::npos) << error_text();
      EXPECT_EQ(MPIABI_Comm_split(MPIABI_COMM_WORLD, 0, rank, &made), LIGHTCC_SHUT_DOWN);
      int size = 0;  // jaxlib does not look at what the split returned
      EXPECT_EQ(MPIABI_Comm_size(made, &size), LIGHTCC_SHUT_DOWN);
      EXPECT_EQ(size, 1);
      EXPECT_EQ(MPIABI_Allreduce(&number, &sum, 1, MPIABI_INT32_T, MPIABI_SUM, made), LIGHTCC_SHUT_DOWN);
      EXPECT_NE(error_text().find("bad batch"), std::string::npos) << error_text();
    }
    ok(MPIABI_Comm_free(&made));
  });
}

// JAX's last operations may still wait for their turn when the program ends.
TEST(MpiAbi, TheEndWaitsForWhatOtherRanksNeed) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    std::thread late;
    if (rank == 0)
      late = std::thread([&] {
        ranks.become(0);
        const uint64_t deadline = now_ns() + kPatienceNs;
        const auto& in_flight = ranks[0].counters().values[Counters::most_in_flight];
        while (in_flight == 0 && now_ns() < deadline) std::this_thread::yield();
        EXPECT_EQ(gathered(MPIABI_COMM_WORLD, 0), (std::vector<int32_t>{0, 1}));
      });
    if (rank == 1) {
      EXPECT_EQ(gathered(MPIABI_COMM_WORLD, 1), (std::vector<int32_t>{0, 1}));
    }
    ok(MPIABI_Finalize());
    if (late.joinable()) late.join();
    EXPECT_FALSE(lightcc_initialized());
    ok(MPIABI_Finalize());
  });
}

TEST(MpiAbi, AFunctionThatIsNotCarriedEndsTheProgram) {
  EXPECT_EXIT(MPIABI_Bcast(), testing::ExitedWithCode(1), "JAX has called MPI_Bcast in");
}

}  // namespace
}  // namespace lightcc::test
