#include "api/tensorflow/c_api.h"

#include <dlfcn.h>

namespace lightcc::tf {

Functions api;

const char* find_functions() {
  const char* missing = nullptr;
  void* tensorflow = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (!tensorflow) return "libtensorflow_framework.so.2";
#define LIGHTCC_FIND(result, name, arguments)                                                           \
  if (!missing && !(api.name = reinterpret_cast<decltype(api.name)>(dlsym(tensorflow, "TF_" #name)))) \
    missing = "TF_" #name;
  LIGHTCC_TENSORFLOW_FUNCTIONS(LIGHTCC_FIND)
#undef LIGHTCC_FIND
  return missing;
}

}  // namespace lightcc::tf
