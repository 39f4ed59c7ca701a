// The functions of MPI that JAX never calls: other_names.txt, of which the build makes one each.
#pragma once

namespace lightcc::mpiabi {

// JAX has called one all the same: says so and ends the job on all ranks.
[[noreturn]] void not_carried(const char* function);

}  // namespace lightcc::mpiabi
