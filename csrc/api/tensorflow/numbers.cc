// The operations that make one number, and join, which waits for one.
#include <cstdint>
#include <iterator>
#include <memory>
#include <thread>
#include <utility>

#include "api/tensorflow/kernel.h"

namespace lightcc::tf {
namespace {

void set_number(Context* context, int value) {
  Result result;
  Tensor* output = api.AllocateOutput(context, 0, kInt32, nullptr, 0, sizeof(int32_t), result);
  if (!result.ok()) return api.OpKernelContext_Failure(context, result);
  *static_cast<int32_t*>(api.TensorData(output)) = value;
  api.DeleteTensor(output);
}

constexpr int kNoSuchSet = -2;  // a value of HorovodProcessSetIncluded, not a failure

int is_included(int group) { return lightcc_group_size(group) < 0 ? kNoSuchSet : int(lightcc_group_rank(group) >= 0); }

const char* not_initialised() {  // in the core's words
  lightcc_group_size(0);
  return lightcc_error();
}

struct NumberOp {
  const char* operation;
  int (*value)(int group);
  bool of_group;
};
constexpr NumberOp kNumbers[] = {
    {"HorovodToken", [](int) { return 0; }, false},
    {"HorovodRank", [](int) { return lightcc_rank(); }, false},
    {"HorovodLocalRank", [](int) { return lightcc_local_rank(); }, false},
    {"HorovodLocalSize", [](int) { return lightcc_local_size(); }, false},
    {"HorovodSize", lightcc_group_size, true},
    {"HorovodProcessSetIncluded", is_included, true}};

template <size_t number> void* create_number(Construction* construction) {
  Attributes attributes(construction);
  auto group = std::make_unique<int>(kNumbers[number].of_group ? attributes.integer("process_set_id") : 0);
  attributes.complain();
  return group.release();
}
template <size_t number> void compute_number(void* group, Context* context) {
  const int value = kNumbers[number].value(*static_cast<int*>(group));
  if (value >= 0 || value == kNoSuchSet) return set_number(context, value);
  fail(context, lightcc_initialized() ? kInvalidArgument : kFailedPrecondition,
       std::string(kNumbers[number].operation) + ": " +
           (lightcc_initialized() ? "no such process set" : not_initialised()));
}
void destroy_number(void* group) { delete static_cast<int*>(group); }

// A join lasts as long as the others' training; nobody may wait for it inside the engine or on a thread of TensorFlow.
void compute_join(void*, Context* context, Done* done) {
  const int64_t handle = lightcc_join();
  Completion finish(done);
  if (handle < 0) {
    fail(context, code_of_refusal(int(-handle)), std::string("HorovodJoin: ") + lightcc_error());
    return finish();
  }
  std::thread([=]() mutable {
    int status;
    while ((status = lightcc_wait(handle, 1000)) == LIGHTCC_PENDING) {}
    if (status == LIGHTCC_OK)
      set_number(context, lightcc_last_joined(handle));
    else
      fail(context, code_of(status), std::string("HorovodJoin: ") + lightcc_error());
    lightcc_release(handle);
    finish();
  }).detach();
}

template <size_t... number> void add_numbers(const char* device, std::index_sequence<number...>) {
  (add_kernel(kNumbers[number].operation,
              api.NewKernelBuilder(kNumbers[number].operation, device, create_number<number>, compute_number<number>,
                                   destroy_number),
              {"output"}),
   ...);
}

}  // namespace

void register_numbers() {
  for (const char* device : kDevices) {
    add_numbers(device, std::make_index_sequence<std::size(kNumbers)>());
    add_kernel("HorovodJoin",
               api.NewAsyncKernelBuilder("HorovodJoin", device, [](Construction*) -> void* { return nullptr; },
                                         compute_join, [](void*) {}),
               {"output"});
  }
  for (const NumberOp& number : kNumbers) add_refusal(number.operation);
  add_refusal("HorovodJoin");
}

}  // namespace lightcc::tf
