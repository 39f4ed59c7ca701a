#include "engine/run/memory_agreement.h"

#include <gtest/gtest.h>


#include "collective/links.h"
#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

using Lacking = std::vector<std::optional<size_t>>;  // the tensor, by member

// Whether all members have come to this; "": there is memory.
void expect_all_find(const Lacking& lacking, const std::string& expected) {
  const int size = int(lacking.size());
  LoopNetwork network(size);
  std::vector<std::unique_ptr<LinksBackend>> backends;
  std::vector<Selector> selectors;
  std::vector<std::unique_ptr<MemoryAgreement>> agreements;
  std::vector<Work*> works;
  for (int member = 0; member < size; ++member) {
    backends.push_back(std::make_unique<LinksBackend>(network.links(member)));
    Backend* const only = backends.back().get();
    selectors.emplace_back(std::span<Backend* const>(&only, 1), 1, "");
    Collective c{};
    c.index = member;
    c.size = size;
    agreements.push_back(std::make_unique<MemoryAgreement>(selectors.back(), c, lacking[size_t(member)]));
    works.push_back(&agreements.back()->work());
  }
  test::drive(works);
  for (const auto& one : agreements) {
    const std::string found = one->is_lacking()
                                  ? std::to_string(one->member()) + " " + std::to_string(one->tensor())
                                  : "";
    EXPECT_EQ(found, expected);
  }
}

TEST(MemoryAgreement, AllFindTheSame) {
  const std::nullopt_t has{std::nullopt};
  expect_all_find({has}, "");
  expect_all_find({has, has, has, has}, "");
  expect_all_find({0, has, has}, "0 0");
  expect_all_find({has, has, 7}, "2 7");
  expect_all_find({3, has, 1, has}, "2 1");
  expect_all_find({has, size_t(0xfffffffe)}, "1 4294967294");
}

}  // namespace
}  // namespace lightcc
