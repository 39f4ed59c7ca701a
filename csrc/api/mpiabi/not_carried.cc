#include "api/mpiabi/not_carried.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "api/lightcc.h"

namespace lightcc::mpiabi {

constexpr int kError = 4;  // of HOROVOD_LOG_LEVEL's numbers

void not_carried(const char* function) {
  const std::string text = std::string("JAX has called MPI_") + (std::strchr(function, '_') + 1) +
                           " in liblightcc_jax.so, which carries only what jaxlib 0.4.38 to 0.10.2 call. Use one of "
                           "these, or JAX's own collectives: JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo";
  lightcc_log(kError, text.c_str());
  lightcc_abort(text.c_str());
  lightcc_shutdown_because(text.c_str());  // it returns when the others have been told
  std::_Exit(1);
}

}  // namespace lightcc::mpiabi
