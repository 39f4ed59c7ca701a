// Ranks that disagree: every rank is told what differs and who has what, and the next operation works.
#include <functional>

#include "unit/helpers.h"
#include "labels.h"
#include "unit/ranks.h"

LABEL(on_hosts);

namespace lightcc {
namespace {

using namespace test;

// How the call is made. All have at least this many tensors of one element type, and end in the one that differs.
struct Style {
  const char* name;
  const char* tensor;  // "": an automatic name
  int tensors;
  bool cached;         // ran before, in agreement
  int64_t count;
};
constexpr Style kStyles[] = {{"named", "grad", 1, false, 100},
                             {"unnamed", "", 1, false, 100},
                             {"grouped", "grads", 3, false, 100},
                             {"cached", "grad", 1, true, 100},
                             {"cached group", "grads", 3, true, 100},
                             {"one element", "loss", 1, false, 1},
                             {"one element, unnamed", "", 1, false, 1}};

struct Difference {
  const char* name;      // as the message calls it
  Kind kind;
  void (*make)(Request&);
  const char *ours, *theirs;  // as the message shows them, for 100 elements
};
const Difference kDifferences[] = {
    {"shape", Kind::allreduce, [](Request& r) { r.what.tensors.back().shape.push_back(1); }, "[100]", "[100, 1]"},
    {"shape", Kind::broadcast, [](Request& r) { r.what.tensors.back().shape = {2, 3}; }, "[100]", "[2, 3]"},
    {"shape", Kind::reducescatter, [](Request& r) { r.what.tensors.back().shape = {7}; }, "[100]", "[7]"},
    {"shape", Kind::allgather, [](Request& r) { r.what.tensors.back().shape = {2, 3}; }, "[any]", "[any, 3]"},
    {"dtype", Kind::allreduce, [](Request& r) { r.what.tensors.back().dtype = DType::int32; }, "float32", "int32"},
    {"dtype", Kind::allgather, [](Request& r) { r.what.tensors.back().dtype = DType::uint8; }, "float32", "uint8"},
    {"reduce op", Kind::allreduce, [](Request& r) { r.what.op = ReduceOp::max; }, "sum", "max"},
    {"reduce op", Kind::reducescatter, [](Request& r) { r.what.op = ReduceOp::average; }, "sum", "average"},
    {"root rank", Kind::broadcast, [](Request& r) { r.what.root = 1; }, "0", "1"},
    {"prescale factor", Kind::allreduce, [](Request& r) { r.what.pre = 0.5; }, "1", "0.5"},
    {"postscale factor", Kind::reducescatter, [](Request& r) { r.what.post = 3; }, "1", "3"},
    {"number of tensors", Kind::allreduce,
     [](Request& r) {
       r.what.tensors.push_back(r.what.tensors[0]);
       r.inputs.push_back(r.inputs[0]), r.outputs.push_back(r.outputs[0]);
     },
     "", ""}};

TEST(Disagreement, EveryRankIsToldAndTheNextOperationWorks) {
  Ranks ranks(3);
  for (const Difference& difference : kDifferences)
    for (const Style& style : kStyles)
      ranks.each([&](Engine& engine, int rank) {
        SCOPED_TRACE(std::string(difference.name) + " of " + name_of(difference.kind) + ", " + style.name);
        std::vector<std::vector<double>> memory(size_t(style.tensors), std::vector<double>(200));  // room for each type
        const auto make = [&] {
          std::vector<Tensor> tensors;
          for (auto& tensor : memory) tensors.push_back({DType::float32, {style.count}, tensor.data(), tensor.data()});
          return request(engine, difference.kind, style.tensor, tensors);
        };
        if (style.cached) done(engine, make());
        auto wrong = make();
        if (rank == 1) difference.make(*wrong);
        EXPECT_EQ(run(engine, wrong), Code::mismatch) << wrong->text;
        EXPECT_TRUE(contains(wrong->text, wrong->title() + ": ranks disagree on " + difference.name)) << wrong->text;
        EXPECT_TRUE(contains(wrong->text, "ranks 0, 2 have ")) << wrong->text;
        EXPECT_TRUE(contains(wrong->text, ", rank 1 has ")) << wrong->text;
        if (style.count == 100) {
          EXPECT_TRUE(contains(wrong->text, std::string("ranks 0, 2 have ") + difference.ours)) << wrong->text;
          EXPECT_TRUE(contains(wrong->text, std::string("rank 1 has ") + difference.theirs)) << wrong->text;
        }
        done(engine, make());
        std::vector<float> next(10, 1);
        done(engine, request(engine, Kind::allreduce, "", {in_place(next)}));
        EXPECT_EQ(next[9], 3);
      });
}

TEST(Disagreement, OthersInFlightAreNotHarmed) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    std::vector<std::vector<float>> tensors(30, std::vector<float>(10, 1));
    std::vector<RequestPtr> requests;
    for (size_t i = 0; i < tensors.size(); ++i) {
      requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(tensors[i])}));
      if (i % 3 == 0 && rank == 2) requests.back()->what.tensors[0].shape = {5};
      engine.submit(requests.back(), false);
    }
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_EQ(finish(engine, requests[i]), i % 3 == 0 ? Code::mismatch : Code::ok) << requests[i]->text;
    EXPECT_EQ(tensors[1], std::vector<float>(10, 3));
    EXPECT_EQ(tensors[0], std::vector<float>(10, 1)) << "a failed request wrote its output";
  });
}

// The one thing that no negotiation sees: each process set has its own.
TEST(Disagreement, OnTheProcessSetIsFoundByWhoWaits) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    const int pair = add_group(engine, {0, 1});
    for (const char* name : {"x", ""})
      if (rank < 2) {
        std::vector<float> x(10, 1);
        auto wrong = request(engine, Kind::allreduce, name, {in_place(x)}, rank == 0 ? pair : 0);
        EXPECT_EQ(run(engine, wrong), Code::mismatch);
        EXPECT_TRUE(contains(wrong->text, "ranks disagree on the process set")) << wrong->text;
        EXPECT_TRUE(contains(wrong->text, "rank 0 gave it to process set 1 (ranks 0, 1)")) << wrong->text;
        EXPECT_TRUE(contains(wrong->text, "rank 1 gave it to process set 0 (ranks 0, 1, 2)")) << wrong->text;
      } else {  // is told when it comes to it
        std::vector<float> x(10, 1);
        EXPECT_EQ(run(engine, request(engine, Kind::allreduce, name, {in_place(x)})), Code::mismatch);
      }
    std::vector<float> next(10, 1);
    done(engine, request(engine, Kind::allreduce, "", {in_place(next)}));
    EXPECT_EQ(next[9], 3);
    if (rank < 2) done(engine, request(engine, Kind::allreduce, "", {in_place(next)}, pair));
  });
}

}  // namespace
}  // namespace lightcc
