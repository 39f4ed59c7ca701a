// Fusion by table: these ready requests, exactly those buckets; these tensors, exactly that layout.
#include "engine/negotiate/control/fusion.h"

#include <gtest/gtest.h>

#include <cmath>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr int32_t kOne[] = {1}, kTwo[] = {2};
constexpr FusionLimits kLimits{64 << 20, true};

struct Ready : ReadyRequest {  // what a row does not say is as in all others
  explicit Ready(int64_t bytes)
      : ReadyRequest{Kind::allreduce, ReduceOp::sum, 1, 1, {}, DType::float32, bytes, 0, {}} {}
  Ready with(auto member, auto value) const {
    Ready other = *this;
    other.*member = value;
    return other;
  }
  Ready of(Kind value) const { return with(&Ready::kind, value); }
  Ready of(ReduceOp value) const { return with(&Ready::op, value); }
  Ready of(DType value) const { return with(&Ready::dtype, value); }
  Ready of(const Codec& value) const { return with(&Ready::codec, value); }
  Ready mixed() const { return with(&Ready::dtype, std::nullopt); }  // a group of several dtypes
  Ready scaled(double pre, double post) const { return with(&Ready::pre, pre).with(&Ready::post, post); }
  Ready at(uintptr_t address) const { return with(&Ready::address, address); }
  Ready without(std::span<const int32_t> members) const { return with(&Ready::absent, members); }
};

struct FusionRow {
  const char* name;
  std::vector<Ready> ready;
  FusionLimits limits;
  std::vector<Bucket> buckets;
};
void PrintTo(const FusionRow& row, std::ostream* out) { *out << row.name; }

class Fuse : public testing::TestWithParam<FusionRow> {};

TEST_P(Fuse, MakesTheseBuckets) {
  const std::vector<ReadyRequest> ready(GetParam().ready.begin(), GetParam().ready.end());
  EXPECT_EQ(fuse(ready, GetParam().limits), GetParam().buckets);
}

const Ready k40 = Ready(40);
const FusionRow kFusionRows[] = {
    {"Nothing", {}, kLimits, {}},
    {"OneRequest", {k40}, kLimits, {{0}}},
    {"AlikeRequestsShareABucket", {k40, k40, k40}, kLimits, {{0, 1, 2}}},
    {"FusionTurnedOff", {k40, k40}, {64 << 20, false}, {{0}, {1}}},

    // What one collective has only one of.
    {"AnotherOp", {k40, k40.of(ReduceOp::average), k40}, kLimits, {{0, 2}, {1}}},
    {"AnotherPrescale", {k40, k40.scaled(0.5, 1), k40}, kLimits, {{0, 2}, {1}}},
    {"AnotherPostscale", {k40, k40.scaled(1, 0.5), k40}, kLimits, {{0, 2}, {1}}},
    {"AFactorThatEqualsNothing", {k40.scaled(NAN, 1), k40.scaled(NAN, 1)}, kLimits, {{0}, {1}}},
    {"AnotherDtype", {k40, k40.of(DType::float64), k40}, kLimits, {{0, 2}, {1}}},
    {"AnotherCodec", {k40, k40.of(Codec{CodecKind::int8, DType::int8}), k40}, kLimits, {{0, 2}, {1}}},
    {"GroupsOfSeveralDtypes", {k40.mixed(), k40, k40.mixed()}, kLimits, {{0}, {1}, {2}}},
    {"OthersAreAbsent", {k40.without(kOne), k40.without(kTwo), k40, k40.without(kOne)}, kLimits, {{0, 3}, {1}, {2}}},
    {"AnotherKind", {k40, k40.of(Kind::reducescatter), k40}, kLimits, {{0, 2}, {1}}},
    {"OnlyAllreducesAreFused", {k40.of(Kind::broadcast), k40.of(Kind::broadcast)}, kLimits, {{0}, {1}}},
    {"ManyKindsAtOnce",
     {k40.of(ReduceOp::max), k40, k40.of(Kind::barrier), k40.of(ReduceOp::max), k40},
     kLimits,
     {{0, 3}, {1, 4}, {2}}},

    // How much.
    {"ABucketIsFull", {Ready(60), Ready(40), Ready(1)}, {100, true}, {{0, 1}, {2}}},
    {"ASmallOneFitsIntoAnEarlierBucket",
     {k40, Ready(80), Ready(60), Ready(400), Ready(20)},
     {100, true},
     {{0, 2}, {1, 4}, {3}}},
    {"AboveTheLimitARequestRunsAlone", {Ready(101), Ready(0)}, {100, true}, {{0}, {1}}},
    {"PrivateMemoryUpToWhatIsCopied",
     {Ready(kMostCopiedBytes), Ready(kMostCopiedBytes)},
     kLimits,
     {{0, 1}}},
    {"PrivateMemoryAboveWhatIsCopied",
     {Ready(kMostCopiedBytes + 1), k40, Ready(kMostCopiedBytes + 1), k40},
     kLimits,
     {{0}, {1, 3}, {2}}},
    {"SharedMemoryOfAnySize", {Ready(8 << 20).at(4096), Ready(8 << 20).at(16 << 20)}, kLimits, {{0, 1}}},

    // Where the coordinator's tensors lie.
    {"SharedAndPrivateMemory", {k40.at(4096), k40, k40.at(8192), k40}, kLimits, {{0, 2}, {1, 3}}},
    {"ByAddressInSharedMemory", {k40.at(3000), k40.at(1000), k40.at(2000)}, kLimits, {{1, 2, 0}}},
    {"EqualAddressesKeepTheirOrder", {k40.at(2000), k40.at(1000), k40.at(2000)}, kLimits, {{1, 0, 2}}},
    {"BucketsStandInTheOrderOfTheirFirstRequests",
     {k40.at(9000), Ready(80).at(1000), k40.at(500)},
     {100, true},
     {{2, 0}, {1}}},
};
INSTANTIATE_TEST_SUITE_P(Rows, Fuse, testing::ValuesIn(kFusionRows), [](auto& row) { return row.param.name; });

// ---- how: a batch's tensors in its collectives

struct LayoutRow {
  const char* name;
  std::vector<BatchTensor> tensors;
  bool shared;              // the memory of all of them
  const char* collectives;  // "float32 0@0 2@128 =160 buffer@0": tensors at their offsets, bytes, where it runs
  size_t buffer_bytes;
};
void PrintTo(const LayoutRow& row, std::ostream* out) { *out << row.name; }

std::string text_of(const BatchLayout& layout) {
  std::string text;
  for (const CollectiveLayout& collective : layout.collectives) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(collective.dtype));
    for (auto [tensor, offset] : collective.places) text += " " + std::to_string(tensor) + "@" + std::to_string(offset);
    text += " =" + std::to_string(collective.bytes);
    text += collective.buffer_offset ? " buffer@" + std::to_string(*collective.buffer_offset) : " in place";
  }
  return text;
}

std::byte memory[1024];
BatchTensor in_place(size_t bytes, size_t at, DType dtype = DType::float32) {
  return {dtype, bytes, memory + at, memory + at};
}
BatchTensor to(size_t bytes, size_t from, size_t at) { return {DType::float32, bytes, memory + from, memory + at}; }

class LayOut : public testing::TestWithParam<LayoutRow> {};

TEST_P(LayOut, MakesTheseCollectives) {
  const LayoutRow& row = GetParam();
  const BatchLayout layout = lay_out(row.tensors, [&](const void*, size_t) { return row.shared; });
  EXPECT_EQ(text_of(layout), row.collectives);
  EXPECT_EQ(layout.buffer_bytes, row.buffer_bytes);
}

constexpr DType kDouble = DType::float64;
const LayoutRow kLayoutRows[] = {
    {"Nothing", {}, true, "", 0},
    {"OnlyTensorsWithoutElements", {in_place(0, 0), in_place(0, 64)}, true, "", 0},
    {"OneTensorRunsWhereItIs", {to(40, 0, 512)}, false, "float32 0@0 =40 in place", 0},
    {"SideBySideInSharedMemory",
     {in_place(40, 0), in_place(64, 64), in_place(8, 128)},
     true,
     "float32 0@0 1@64 2@128 =136 in place",
     0},
    {"SideBySideInPrivateMemory", {in_place(40, 0), in_place(64, 64)}, false, "float32 0@0 1@64 =128 buffer@0", 128},
    {"AGapBetweenThem", {in_place(40, 0), in_place(40, 128)}, true, "float32 0@0 1@64 =104 buffer@0", 104},
    {"InTheOtherOrder", {in_place(40, 64), in_place(40, 0)}, true, "float32 0@0 1@64 =104 buffer@0", 104},
    {"AnOutputOfItsOwn", {in_place(40, 0), to(40, 64, 512)}, true, "float32 0@0 1@64 =104 buffer@0", 104},
    {"TensorsWithoutElementsAreInNobodysWay",
     {in_place(0, 512), in_place(40, 0), in_place(0, 700), in_place(40, 64)},
     true,
     "float32 1@0 3@64 =104 in place",
     0},
    {"ACollectiveForEachDtype",
     {in_place(40, 0, kDouble), in_place(40, 64), in_place(16, 128, kDouble), in_place(40, 192)},
     false,
     "float32 1@0 3@64 =104 buffer@0, float64 0@0 2@64 =80 buffer@128",
     208},
    {"OneDtypeInPlaceAndOneInTheBuffer",
     {in_place(40, 0, kDouble), in_place(40, 128), in_place(40, 512), in_place(16, 64, kDouble)},
     true,
     "float32 1@0 2@64 =104 buffer@0, float64 0@0 3@64 =80 in place",
     104},
};
INSTANTIATE_TEST_SUITE_P(Rows, LayOut, testing::ValuesIn(kLayoutRows), [](auto& row) { return row.param.name; });

TEST(LayOut, AsksAboutTheWholeSpanOfACollective) {
  std::vector<std::pair<const void*, size_t>> asked;
  lay_out(std::vector{in_place(40, 64), in_place(40, 128)}, [&](const void* begin, size_t bytes) {
    asked.push_back({begin, bytes});
    return true;
  });
  EXPECT_EQ(asked, (std::vector<std::pair<const void*, size_t>>{{memory + 64, 104}}));
}

}  // namespace
}  // namespace lightcc
