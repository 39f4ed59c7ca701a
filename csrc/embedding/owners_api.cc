// The C API of owner maps.
#include <algorithm>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace {

void expect_ranks(int ranks) {
  if (ranks < 1 || ranks > 65535)
    throw Error(Code::invalid_argument, std::to_string(ranks) + " ranks cannot own buckets");
}

}  // namespace

extern "C" {

int lightcc_embedding_owners(const lightcc_embedding_table* table, uint16_t* owners) {
  std::copy(table->owners.begin(), table->owners.end(), owners);
  return 0;
}

int lightcc_embedding_set_owners(lightcc_embedding_table* table, const uint16_t* owners) {
  return guard([&] {
    if (*std::max_element(owners, owners + kBuckets) >= table->group.size())
      throw Error(Code::invalid_argument, table->about("an owner is no rank of its group"));
    table->set_owners({owners, owners + kBuckets});
    return 0;
  });
}

int lightcc_embedding_owner_of(const lightcc_embedding_table* table, const int64_t* keys, int64_t count,
                               uint16_t* ranks) {
  for (int64_t i = 0; i < count; ++i) ranks[i] = uint16_t(owner_of(table->owners, keys[i]));
  return 0;
}

int lightcc_embedding_first_owners(int ranks, uint16_t* owners) {
  return guard([&] {
    expect_ranks(ranks);
    const Owners first = first_owners(ranks);
    std::copy(first.begin(), first.end(), owners);
    return 0;
  });
}

int lightcc_embedding_move_owners(const uint16_t* owners, int before, const int32_t* new_rank_of, int after,
                                  uint16_t* moved) {
  return guard([&] {
    expect_ranks(before);
    expect_ranks(after);
    std::vector<int32_t> ranks(size_t(before), 0);
    for (int rank = 0; rank < before; ++rank)
      ranks[size_t(rank)] = new_rank_of ? new_rank_of[rank] : rank < after ? rank : -1;
    const Owners result = move_owners({owners, owners + kBuckets}, ranks, after);
    std::copy(result.begin(), result.end(), moved);
    return 0;
  });
}
}
