// A libpmix for tests: keeps values in this process, and fails as the key asks it to.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

// As far as lightcc uses them (PMIx standard, chapter 3).
struct Proc {
  char nspace[256];
  uint32_t rank;
};
struct Value {
  uint16_t type;
  union {
    char* string;
    char room[24];
  } data;
};
constexpr uint16_t kString = 3;
constexpr int kSuccess = 0, kNotFound = -46;

std::map<std::string, std::string> values;
std::string last_key;

}  // namespace

extern "C" {

int PMIx_Init(Proc* self, void*, size_t) {
  std::strcpy(self->nspace, "a job");
  self->rank = 0;
  return kSuccess;
}
int PMIx_Finalize(const void*, size_t) { return kSuccess; }
int PMIx_Put(uint8_t, const char* key, Value* value) {
  last_key = key;
  if (last_key == "put fails") return kNotFound;
  if (last_key == "crashes") std::_Exit(1);
  values[last_key] = value->data.string;
  return kSuccess;
}
int PMIx_Commit() { return last_key == "commit fails" ? kNotFound : kSuccess; }
int PMIx_Fence(const Proc* procs, size_t count, const void*, size_t) {
  if (last_key == "hangs") sleep(3600);
  for (size_t i = 0; i < count; ++i)
    if (procs[i].rank != i || std::strcmp(procs[i].nspace, "a job") != 0) return kNotFound;
  return kSuccess;
}
int PMIx_Get(const Proc* from, const char* key, const void*, size_t, Value** value) {
  if (from->rank != 0 || values.count(key) == 0) return kNotFound;
  *value = static_cast<Value*>(std::calloc(1, sizeof(Value)));
  (*value)->type = std::strcmp(key, "is no text") == 0 ? 0 : kString;
  if ((*value)->type == kString) (*value)->data.string = strdup(values[key].c_str());
  return kSuccess;
}
const char* PMIx_Error_string(int) { return "NOT-FOUND"; }
const char* PMIx_Get_version() { return "A double 4.2.2rc1 (of no standard)"; }
int PMIx_Initialized() { return 0; }

}
