// What MPI's datatypes and operations are in lightcc's words. Pure.
#pragma once
#include <cstddef>
#include <cstdint>

#include "api/mpiabi/abi.h"

namespace lightcc::mpiabi {

// One element of an MPI datatype: `numbers` of lightcc's dtype, two of a complex one.
struct Element {
  int32_t dtype;
  int64_t numbers;
  int64_t bytes;
  const char* name;
};

// Throws Error{invalid_argument} for a handle that is none of abi.h's.
const Element& element_of(MPIABI_Datatype);

// The lightcc_op. Throws Error{invalid_argument} for what cannot be reduced by it: complex numbers are added only.
int32_t op_of(MPIABI_Op, const Element&);

}  // namespace lightcc::mpiabi
