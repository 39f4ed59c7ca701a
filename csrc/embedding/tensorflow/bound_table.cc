#include "embedding/tensorflow/bound_table.h"

#include <map>
#include <mutex>
#include <sstream>

#include "embedding/tensorflow/call_thread.h"
#include "embedding/tensorflow/trained_lookups.h"

namespace lightcc::tf {
namespace {

std::mutex mutex;
std::map<int64_t, BoundTable>& bound() {  // never destroyed: TensorFlow's threads may outlive this library's statics
  static auto* tables = new std::map<int64_t, BoundTable>;
  return *tables;
}

constexpr const char* kGone =
    "its table was closed, or is of a world that was left: after init(), table.enter() takes it into the new one, as "
    "sync() of an elastic job's state does";

void forget_lookups(int64_t number) {
  call_thread().post([number] { trained_lookups().forget(number); });
}

}  // namespace

std::vector<int64_t> parse_numbers(const std::string& text) {
  std::istringstream words(text);
  std::vector<int64_t> numbers;
  for (int64_t number; words >> number;) numbers.push_back(number);
  return numbers;
}

bool find_tables(const std::vector<int64_t>& numbers, std::vector<BoundTable>* tables, std::string* why) {
  const std::lock_guard lock(mutex);
  for (const int64_t number : numbers) {
    const auto found = bound().find(number);
    if (found == bound().end()) return *why = kGone, false;
    tables->push_back(found->second);
    if (tables->back().group != tables->front().group)
      return *why = "tables '" + tables->front().name + "' and '" + tables->back().name + "' are of different ranks",
             false;
  }
  return true;
}

}  // namespace lightcc::tf

extern "C" {

void lightcc_embedding_tensorflow_bind(int64_t number, lightcc_embedding_group* group, lightcc_embedding_table* table,
                                       const char* name, int dtype, int64_t dim) {
  using namespace lightcc::tf;
  {
    const std::lock_guard lock(mutex);
    bound()[number] = {number, group, table, name, dtype == LIGHTCC_FLOAT64 ? kDouble : kFloat, dim};
  }
  forget_lookups(number);
}

void lightcc_embedding_tensorflow_unbind(int64_t number) {
  using namespace lightcc::tf;
  {
    const std::lock_guard lock(mutex);
    bound().erase(number);
  }
  forget_lookups(number);
}

int64_t lightcc_embedding_tensorflow_calls(void) { return lightcc::tf::call_thread().calls(); }
}
