// _lightcc_tensorflow.so: TensorFlow opens it (tf.load_op_library), and it registers its operations and kernels with
// the TensorFlow that is loaded already.
#include <dlfcn.h>

#include "api/lightcc.h"
#include "api/tensorflow/c_api.h"

namespace lightcc::tf {

Functions api;

namespace {

const char* missing = nullptr;

bool find_functions() {
  void* tensorflow = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  missing = tensorflow ? nullptr : "libtensorflow_framework.so.2";
#define LIGHTCC_FIND(result, name, arguments)                                                           \
  if (!missing && !(api.name = reinterpret_cast<decltype(api.name)>(dlsym(tensorflow, "TF_" #name)))) \
    missing = "TF_" #name;
  LIGHTCC_TENSORFLOW_FUNCTIONS(LIGHTCC_FIND)
#undef LIGHTCC_FIND
  return !missing;
}

[[gnu::constructor]] void enter() {
  if (!find_functions()) return;
  register_operations();
  register_kernels();
}

}  // namespace
}  // namespace lightcc::tf

// What the loaded TensorFlow lacks, so that nothing is registered; NULL: nothing.
extern "C" LIGHTCC_API const char* lightcc_tensorflow_missing(void) { return lightcc::tf::missing; }
