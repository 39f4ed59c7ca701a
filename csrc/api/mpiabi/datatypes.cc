#include "api/mpiabi/datatypes.h"

#include <iterator>
#include <string>

#include "api/lightcc.h"
#include "base/error.h"

namespace {

// The handles are indices of this table; 0 is none.
constexpr lightcc::mpiabi::Element kElements[] = {
    {LIGHTCC_UINT8, 0, 0, "no datatype"},
    {LIGHTCC_UINT8, 1, 1, "byte"},
    {LIGHTCC_INT8, 1, 1, "int8"},
    {LIGHTCC_UINT8, 1, 1, "uint8"},
    {LIGHTCC_INT16, 1, 2, "int16"},
    {LIGHTCC_UINT16, 1, 2, "uint16"},
    {LIGHTCC_INT32, 1, 4, "int32"},
    {LIGHTCC_UINT32, 1, 4, "uint32"},
    {LIGHTCC_INT64, 1, 8, "int64"},
    {LIGHTCC_UINT64, 1, 8, "uint64"},
    {LIGHTCC_FLOAT32, 1, 4, "float32"},
    {LIGHTCC_FLOAT64, 1, 8, "float64"},
    {LIGHTCC_FLOAT32, 2, 8, "complex64"},
    {LIGHTCC_FLOAT64, 2, 16, "complex128"},
};

}  // namespace

const MPIABI_Datatype MPIABI_BYTE = 1, MPIABI_INT8_T = 2, MPIABI_UINT8_T = 3, MPIABI_INT16_T = 4, MPIABI_UINT16_T = 5,
                      MPIABI_INT32_T = 6, MPIABI_UINT32_T = 7, MPIABI_INT64_T = 8, MPIABI_UINT64_T = 9,
                      MPIABI_FLOAT = 10, MPIABI_DOUBLE = 11, MPIABI_C_COMPLEX = 12, MPIABI_C_FLOAT_COMPLEX = 12,
                      MPIABI_C_DOUBLE_COMPLEX = 13;
const MPIABI_Op MPIABI_SUM = 1, MPIABI_PROD = 2, MPIABI_MIN = 3, MPIABI_MAX = 4;

namespace lightcc::mpiabi {

const Element& element_of(MPIABI_Datatype type) {
  if (type == 0 || type >= std::size(kElements))
    throw Error(Code::invalid_argument, "MPI's datatype " + std::to_string(type) + " is none that lightcc carries");
  return kElements[type];
}

int32_t op_of(MPIABI_Op op, const Element& element) {
  if (op == MPIABI_SUM) return LIGHTCC_SUM;
  const char* name = op == MPIABI_PROD ? "product" : op == MPIABI_MIN ? "minimum" : op == MPIABI_MAX ? "maximum" : "";
  if (!*name)
    throw Error(Code::invalid_argument, "MPI's operation " + std::to_string(op) + " is none that lightcc carries");
  if (element.numbers > 1)
    throw Error(Code::invalid_argument, std::string("a ") + name + " of " + element.name +
                                            " numbers: lightcc adds complex numbers; gather them (all_gather) and "
                                            "compute it from that");
  return op == MPIABI_PROD ? LIGHTCC_PRODUCT : op == MPIABI_MIN ? LIGHTCC_MIN : LIGHTCC_MAX;
}

}  // namespace lightcc::mpiabi
