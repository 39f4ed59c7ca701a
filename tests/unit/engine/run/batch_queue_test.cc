// The queue by script: which batches are added, how far they come, and what is to be done about their requests.
#include "engine/run/batch_queue.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "labels.h"
#include "unit/thread_peers.h"

LABEL(as_placed);

namespace lightcc {
namespace {

// A group of one rank, whose collectives end at once.
class QueueOfOne {
 public:
  QueueOfOne() : peers_(std::move(test::thread_peers({1})[0])) {}

  BatchQueue& operator*() { return queue_; }
  BatchQueue* operator->() { return &queue_; }
  RequestPtr add(Kind kind, const std::string& name) {
    auto request = std::make_shared<Request>();
    request->what.kind = kind;
    request->what.op = ReduceOp::sum;
    request->what.tensors = {{DType::float32, {1}}};
    request->inputs = {&input_};
    request->outputs = {&output_};
    request->key = key_of(kind, name);
    queue_.add({BatchItem{request, {}}});
    return request;
  }
  // Steps it until nothing moves. The names of the requests in the batches that have ended, in order.
  std::string run() {
    std::string names;
    for (bool moved = true; moved;) {
      moved = queue_.step();
      while (const auto done = queue_.take_done()) names += done->batch->items()[0].request->name(), moved = true;
      if (!effects_.empty()) break;  // of the engine it may need something
    }
    return names;
  }
  std::optional<Effect> take_effect() { return effects_.pop(); }

 private:
  const std::unique_ptr<Peers> peers_;
  const std::shared_ptr<const Group> group_ =
      std::make_shared<Group>(0, std::vector<int>{0}, 0, peers_->topology());
  const Config config_;
  Counters counters_;
  Timeline timeline_;
  Tracing tracing_{timeline_};
  NcclLaunches launches_;
  GroupTable groups_;
  Effects effects_;
  GroupBackends backends_{*peers_, *group_, config_};
  const RunResources shared_{*peers_, config_, std::make_shared<OutputPool>(1 << 20, 1'000'000'000),
                             std::make_shared<PinnedPool>(peers_->arena(), 1 << 20), counters_, tracing_, launches_,
                             groups_, effects_};
  BatchQueue queue_{shared_, group_, backends_};
  float input_ = 3, output_ = 0;
};

// What is to be done about a request, in words.
std::string text_of(const std::optional<Effect>& effect) {
  if (!effect) return "nothing";
  if (const auto* end = std::get_if<effect::Finish>(&*effect))
    return "finish " + end->request->name() + (end->code == Code::ok ? "" : " with " + end->text);
  if (const auto* change = std::get_if<effect::ChangeGroups>(&*effect)) return "change " + change->request->name();
  return "something else";
}

TEST(BatchQueue, EndsBatchesInTheirOrder) {
  QueueOfOne queue;
  for (const char* name : {"a", "b", "c"}) queue.add(Kind::allreduce, name);
  EXPECT_EQ(queue->size(), 3u);
  std::string ended, effects;
  for (int i = 0; i < 3; ++i) {
    ended += queue.run();
    effects += text_of(queue.take_effect()) + "; ";
  }
  EXPECT_EQ(ended, "abc");
  EXPECT_EQ(effects, "finish a; finish b; finish c; ");
  EXPECT_EQ(queue->size(), 0u);
  EXPECT_GT(queue->waits_since(Request(RequestForm(Kind::join, ""))), 0u) << "since the last one ended";
  EXPECT_EQ(queue->waits_since(Request(RequestForm(Kind::barrier, "b"))), 0u) << "since its submission";
}

TEST(BatchQueue, ABatchThatChangesGroupsBeginsOnceThatIsCarriedOut) {
  QueueOfOne queue;
  const RequestPtr change = queue.add(Kind::remove_group, "x");
  queue.add(Kind::barrier, "behind");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(queue.run(), "");
    EXPECT_EQ(text_of(queue.take_effect()), "change x");
    EXPECT_EQ(text_of(queue.take_effect()), "nothing");
  }
  change->changed_group = 1;
  EXPECT_EQ(queue.run(), "x");
  EXPECT_EQ(text_of(queue.take_effect()), "finish x");
  EXPECT_EQ(queue.run(), "behind");
}

TEST(BatchQueue, WhatHasNotEndedFailsInItsOrder) {
  QueueOfOne queue;
  for (const char* name : {"a", "b"}) queue.add(Kind::allreduce, name);
  queue->step();
  queue->fail_all(Code::peer_lost, "rank 1 died");
  for (const char* name : {"a", "b"})
    EXPECT_EQ(text_of(queue.take_effect()),
              std::string("finish ") + name + " with allreduce of tensor '" + name + "': rank 1 died");
  EXPECT_EQ(text_of(queue.take_effect()), "nothing");
  EXPECT_EQ(queue->size(), 0u);
}

}  // namespace
}  // namespace lightcc
