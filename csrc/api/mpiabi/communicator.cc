#include "api/mpiabi/communicator.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/types.h"

namespace lightcc::mpiabi {
namespace {

constexpr int kWaitMs = 1000;  // in one call of lightcc_finish
constexpr size_t kNamed = 8;   // ranks that a name says; the communicator's number tells names apart

std::vector<int> order_of(const std::vector<int>& ranks) {
  std::vector<int> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](int one) { return ranks[size_t(one)]; });
  return order;
}

std::string title_of(const std::vector<int>& ranks) {
  const auto named = ranks.begin() + int(std::min(ranks.size(), kNamed));
  std::string title = (ranks.size() == 1 ? " of rank " : " of ranks ") + text_of(std::vector(ranks.begin(), named));
  if (ranks.size() > kNamed) title += " and " + std::to_string(ranks.size() - kNamed) + " more";
  return title;
}

std::atomic<uint64_t> activities{0};
std::atomic<int> under_way{0};

}  // namespace

Activity activity() { return {activities, under_way}; }

Communicator::Communicator(int number, std::vector<int> given, int own, int in_group)
    : number(number),
      ranks(std::move(given)),
      rank(int(std::ranges::find(ranks, own) - ranks.begin())),
      group(in_group),
      ordered(order_of(ranks)),
      is_ordered(std::ranges::is_sorted(ranks)),
      title_(title_of(ranks)) {}

std::string Communicator::next_name() {
  return "jax." + std::to_string(number) + "." + std::to_string(operations_++) + title_;
}

std::string Communicator::next_message_name() {
  return "jax." + std::to_string(number) + ".m" + std::to_string(messages_++) + title_;
}

int64_t begin(const lightcc_request& request) {
  ++activities;
  ++under_way;
  const int64_t handle = lightcc_submit(&request);
  if (handle <= 0) --under_way;
  if (handle < 0) throw Error(Code(-handle), lightcc_error());
  return handle;
}

void finish(int64_t handle) {
  int status = LIGHTCC_OK;
  do status = lightcc_finish(handle, kWaitMs);
  while (status == LIGHTCC_PENDING);
  --under_way;
  if (status != LIGHTCC_OK) throw Error(Code(status), lightcc_error());
}

void run(lightcc_request request) {
  request.flags |= LIGHTCC_BLOCK;
  if (const int64_t handle = begin(request)) finish(handle);
}

lightcc_request request_of(int kind, const std::string& name, const Communicator& communicator,
                           const lightcc_tensor& tensor) {
  lightcc_request request{};
  request.size = sizeof request;
  request.tensor_size = sizeof tensor;
  request.tensors = &tensor;
  request.count = 1;
  request.kind = kind;
  request.group = communicator.group;
  request.name = name.c_str();
  request.op = LIGHTCC_SUM;
  request.prescale = request.postscale = 1;
  return request;
}

}  // namespace lightcc::mpiabi
