// _lightcc_tensorflow.so: TensorFlow opens it (tf.load_op_library), and it registers its operations and kernels with
// the TensorFlow that is loaded already.
#include "api/lightcc.h"
#include "api/tensorflow/c_api.h"

namespace lightcc::tf {
namespace {

const char* missing = nullptr;

[[gnu::constructor]] void enter() {
  missing = find_functions();
  if (missing) return;
  register_operations();
  register_kernels();
}

}  // namespace
}  // namespace lightcc::tf

// What the loaded TensorFlow lacks, so that nothing is registered; NULL: nothing.
extern "C" LIGHTCC_API const char* lightcc_tensorflow_missing(void) { return lightcc::tf::missing; }
