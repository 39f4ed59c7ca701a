// Messages as JAX sends them: in rings, in part of one, and all to all; and what becomes of the others when one fails.
#include <latch>
#include <numeric>

#include "unit/api/mpiabi/mpi_ranks.h"

LABEL(on_hosts);

namespace lightcc::test {
namespace {

// As XLA does it: a rank receives if anybody sends to it, sends to whom it is to, and waits for all.
std::vector<float> permuted(MPIABI_Comm communicator, const std::vector<float>& own, int from,
                            const std::vector<int>& to) {
  std::vector<float> got(own.size(), -1);
  const int bytes = int(own.size() * sizeof(float));
  std::vector<MPIABI_Request> requests;
  if (from >= 0)
    ok(MPIABI_Irecv(got.data(), bytes, MPIABI_BYTE, from, 0, communicator, &requests.emplace_back()));
  for (int peer : to)
    ok(MPIABI_Isend(own.data(), bytes, MPIABI_BYTE, peer, 0, communicator, &requests.emplace_back()));
  for (MPIABI_Request& request : requests) {
    EXPECT_NE(request, MPIABI_REQUEST_NULL);
    ok(MPIABI_Wait(&request, MPIABI_STATUS_IGNORE));
    EXPECT_EQ(request, MPIABI_REQUEST_NULL);
  }
  return got;
}

TEST(MpiPointToPoint, RingsAndPartsOfThem) {
  for (size_t count : {size_t(1), size_t(300'000)}) {
    MpiRanks ranks(3);
    ranks.each([&](int rank) {
      const MPIABI_Comm backwards = split(MPIABI_COMM_WORLD, 0, -rank);
      for (MPIABI_Comm communicator : {MPIABI_COMM_WORLD, backwards}) {
        const int own = rank_in(communicator), before = (own + 2) % 3, after = (own + 1) % 3;
        const std::vector<float> sent(count, float(own));
        EXPECT_EQ(permuted(communicator, sent, before, {after}), std::vector<float>(count, float(before)));
        const std::vector<float> nothing(count, -1);
        // 0 to 1 alone; then 0 to both others.
        EXPECT_EQ(permuted(communicator, sent, own == 1 ? 0 : -1, own == 0 ? std::vector{1} : std::vector<int>{}),
                  own == 1 ? std::vector<float>(count, 0) : nothing);
        EXPECT_EQ(permuted(communicator, sent, own == 0 ? -1 : 0, own == 0 ? std::vector{1, 2} : std::vector<int>{}),
                  own == 0 ? nothing : std::vector<float>(count, 0));
        EXPECT_EQ(gathered(communicator, own), (std::vector<int32_t>{0, 1, 2})) << "names still agree";
      }
    });
  }
}

TEST(MpiPointToPoint, AllToAll) {
  MpiRanks ranks(3);
  ranks.each([&](int rank) {
    std::vector<int32_t> got(3, rank);
    for (int round = 1; round < 3; ++round) {
      const int to = (rank + round) % 3, from = (rank + 3 - round) % 3;
      const int32_t sent = rank * 10 + to;
      ok(MPIABI_Sendrecv(&sent, 1, MPIABI_INT32_T, to, 0, &got[size_t(from)], 1, MPIABI_INT32_T, from, 0,
                         MPIABI_COMM_WORLD, MPIABI_STATUS_IGNORE));
      EXPECT_EQ(got[size_t(from)], from * 10 + rank);
    }
  });
}

TEST(MpiPointToPoint, CommunicatorsOfTheSameRanksDoNotMix) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    const MPIABI_Comm one = split(MPIABI_COMM_WORLD, 0, rank), other = split(MPIABI_COMM_WORLD, 0, rank);
    int32_t first = 1, second = 2, got_first = 0, got_second = 0;
    MPIABI_Request requests[2];
    if (rank == 0) {
      ok(MPIABI_Isend(&first, 1, MPIABI_INT32_T, 1, 0, one, &requests[0]));
      ok(MPIABI_Isend(&second, 1, MPIABI_INT32_T, 1, 0, other, &requests[1]));
    } else {
      ok(MPIABI_Irecv(&got_second, 1, MPIABI_INT32_T, 0, 0, other, &requests[0]));
      ok(MPIABI_Irecv(&got_first, 1, MPIABI_INT32_T, 0, 0, one, &requests[1]));
    }
    for (MPIABI_Request& request : requests) ok(MPIABI_Wait(&request, MPIABI_STATUS_IGNORE));
    if (rank == 1) {
      EXPECT_EQ(std::pair(got_first, got_second), std::pair(1, 2));
    }
  });
}

// The program's own messages may have any tag, also those that a communicator has.
TEST(MpiPointToPoint, TheProgramsOwnMessagesAreOthers) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    const int32_t number = 10 + rank;
    for (const int32_t tag : {0, 1, 4096, 8192}) {
      int32_t own_got = -1, got = -1;
      const int64_t count = 1;
      const auto own = [&](int kind, const void* from, void* to) {
        const lightcc_tensor tensor{from, to, &count, LIGHTCC_INT32, 1, {}};
        lightcc_request request{};
        request.size = sizeof request, request.tensor_size = sizeof tensor;
        request.tensors = &tensor, request.count = 1, request.kind = kind, request.root = 1 - rank, request.tag = tag;
        request.prescale = request.postscale = 1;
        return lightcc_submit(&request);
      };
      const int32_t own_number = 100 + rank;
      const int64_t sent = own(LIGHTCC_SEND, &own_number, nullptr), received = own(LIGHTCC_RECV, nullptr, &own_got);
      for (MPIABI_Comm communicator : {MPIABI_COMM_WORLD, split(MPIABI_COMM_WORLD, 0, rank)}) {
        ok(MPIABI_Sendrecv(&number, 1, MPIABI_INT32_T, 1 - rank, 0, &got, 1, MPIABI_INT32_T, 1 - rank, 0, communicator,
                           MPIABI_STATUS_IGNORE));
        EXPECT_EQ(got, 11 - rank);
      }
      for (const int64_t handle : {sent, received}) EXPECT_EQ(lightcc_finish(handle, 20'000), LIGHTCC_OK);
      EXPECT_EQ(own_got, 101 - rank);
    }
  });
}

TEST(MpiPointToPoint, BadMessagesAreRefused) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    int32_t number = rank, got = -1;
    MPIABI_Request request = 7;
    const auto expect_refused = [&](int code, const std::string& text) {
      EXPECT_EQ(code, LIGHTCC_INVALID_ARGUMENT);
      EXPECT_NE(error_text().find(text), std::string::npos) << error_text();
    };
    expect_refused(MPIABI_Isend(&number, 1, MPIABI_INT32_T, 2, 0, MPIABI_COMM_WORLD, &request), "there is no rank 2");
    EXPECT_EQ(request, MPIABI_REQUEST_NULL);
    expect_refused(MPIABI_Irecv(&number, -1, MPIABI_INT32_T, 1 - rank, 0, MPIABI_COMM_WORLD, &request), "2^31 or more");
    expect_refused(MPIABI_Irecv(&number, 1, MPIABI_INT32_T, 1 - rank, -1, MPIABI_COMM_WORLD, &request), "the tag -1");
    expect_refused(MPIABI_Sendrecv(&number, 1, MPIABI_INT32_T, 1 - rank, 0, &got, 1, MPIABI_INT32_T, 5, 0,
                                   MPIABI_COMM_WORLD, MPIABI_STATUS_IGNORE),
                   "there is no rank 5");
    ok(MPIABI_Sendrecv(&number, 1, MPIABI_INT32_T, 1 - rank, 0, &got, 1, MPIABI_INT32_T, 1 - rank, 0,
                       MPIABI_COMM_WORLD, MPIABI_STATUS_IGNORE));
    EXPECT_EQ(got, 1 - rank);
  });
}

TEST(MpiPointToPoint, TheEndOfARankIsToldToWhoWaitsForIt) {
  MpiRanks ranks(2);
  ranks.each([&](int rank) {
    if (rank == 1) return void(lightcc_shutdown_because("it ended with ValueError: bad batch"));
    int32_t number = 0, got = 0;
    EXPECT_EQ(MPIABI_Sendrecv(&number, 1, MPIABI_INT32_T, 1, 0, &got, 1, MPIABI_INT32_T, 1, 0, MPIABI_COMM_WORLD,
                              MPIABI_STATUS_IGNORE),
              LIGHTCC_SHUT_DOWN);
    EXPECT_NE(error_text().find("bad batch"), std::string::npos) << error_text();
  });
}

// JAX returns at the first message that fails, and frees the memory of all. Rank 1 has left; what rank 0 exchanges with
// rank 2 must be over by then, so rank 2 cannot take what comes to be in that memory for what was sent.
TEST(MpiPointToPoint, WithOneThatFailsTheOthersEnd) {
  constexpr int kCount = 300'000;
  enum class Fails { a_wait, a_begin, an_exchange };
  for (const Fails fails : {Fails::a_wait, Fails::a_begin, Fails::an_exchange}) {
    MpiRanks ranks(3);
    std::latch given_up(1);
    ranks.each([&](int rank) {
      std::vector<int32_t> out(kCount, 7), in(kCount, -1);
      MPIABI_Request first = MPIABI_REQUEST_NULL, second = MPIABI_REQUEST_NULL, third = MPIABI_REQUEST_NULL;
      if (rank == 1) return void(lightcc_shutdown_because("its data have ended"));
      if (rank == 2) {
        given_up.wait();
        const int sent = MPIABI_Isend(out.data(), kCount, MPIABI_INT32_T, 0, 0, MPIABI_COMM_WORLD, &first);
        EXPECT_NE(sent == MPIABI_SUCCESS ? MPIABI_Wait(&first, MPIABI_STATUS_IGNORE) : sent, MPIABI_SUCCESS);
        EXPECT_NE(MPIABI_Irecv(in.data(), kCount, MPIABI_INT32_T, 0, 0, MPIABI_COMM_WORLD, &first), MPIABI_SUCCESS);
        return;
      }
      if (fails == Fails::an_exchange) {
        EXPECT_EQ(MPIABI_Sendrecv(out.data(), kCount, MPIABI_INT32_T, 1, 0, in.data(), kCount, MPIABI_INT32_T, 2, 0,
                                  MPIABI_COMM_WORLD, MPIABI_STATUS_IGNORE),
                  LIGHTCC_SHUT_DOWN);
      } else {
        ok(MPIABI_Irecv(in.data(), kCount, MPIABI_INT32_T, 2, 0, MPIABI_COMM_WORLD, &first));
        ok(MPIABI_Isend(out.data(), kCount, MPIABI_INT32_T, 2, 0, MPIABI_COMM_WORLD, &second));
        int code = MPIABI_Irecv(in.data(), fails == Fails::a_begin ? -1 : kCount, MPIABI_INT32_T, 1, 0,
                                MPIABI_COMM_WORLD, &third);
        if (code == MPIABI_SUCCESS) code = MPIABI_Wait(&third, MPIABI_STATUS_IGNORE);
        EXPECT_EQ(code, fails == Fails::a_begin ? LIGHTCC_INVALID_ARGUMENT : LIGHTCC_SHUT_DOWN);
      }
      EXPECT_NE(error_text().find(fails == Fails::a_begin ? "2^31 or more" : "has left (its data have ended)"),
                std::string::npos) << error_text();
      EXPECT_TRUE(ranks[0].failure().starts_with("a message of JAX has failed on rank 0: ")) << ranks[0].failure();
      EXPECT_EQ(mpiabi::activity().under_way, 0);
      std::fill(out.begin(), out.end(), 99);
      std::fill(in.begin(), in.end(), 99);
      given_up.count_down();
      ok(MPIABI_Finalize());
      EXPECT_EQ(in, std::vector<int32_t>(kCount, 99));
    });
  }
}

TEST(MpiPointToPoint, NamesTellTheFirstRanksOfManyAndDiffer) {
  std::vector<int> all(1024);
  std::iota(all.begin(), all.end(), 0);
  mpiabi::Communicator one(7, all, 3, 0), other(8, all, 3, 0), few(9, {4, 2}, 2, 1);
  EXPECT_EQ(one.next_name(), "jax.7.0 of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1016 more");
  EXPECT_EQ(one.next_name(), "jax.7.1 of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1016 more");
  EXPECT_EQ(other.next_message_name(), "jax.8.m0 of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1016 more");
  EXPECT_EQ(few.next_name(), "jax.9.0 of ranks 4, 2");
}

}  // namespace
}  // namespace lightcc::test
