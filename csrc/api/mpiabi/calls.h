// What the functions that JAX calls have in common.
#pragma once
#include <string>

#include "api/mpiabi/abi.h"
#include "api/mpiabi/datatypes.h"
#include "base/error.h"

namespace lightcc::mpiabi {

// What MPIABI_Error_string says to this thread.
const std::string& last_error();
void set_last_error(const std::string& text);

// The body of every function. The codes are lightcc's, which MPI leaves to who makes it.
template <class Body> int guard(Body body) {
  try {
    body();
    return MPIABI_SUCCESS;
  } catch (const Error& error) {
    set_last_error(error.what());
    return int(error.code());
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return int(Code::internal);
  }
}

// Memory of JAX that will be written in full. A large one is new, and is to come in huge pages where the system has
// them (madvise): else most of the time of an operation goes into its faults, one for each 4 KiB.
void expect_writes(void* memory, int64_t bytes);

// JAX's counts have 64 bits, and it cuts them to MPI's 32: throws Error{invalid_argument} where that can be seen.
int64_t counted(int count, const Element&);

}  // namespace lightcc::mpiabi
