// For tests of the C API: an epoch of one rank, and requests as callers fill them in.
#pragma once
#include <gtest/gtest.h>

#include <vector>

#include "api/lightcc.h"

namespace lightcc {

struct Api : testing::Test {
  Api() { EXPECT_EQ(lightcc_init(), LIGHTCC_OK) << lightcc_error(); }
  ~Api() override { EXPECT_EQ(lightcc_shutdown(), LIGHTCC_OK) << lightcc_error(); }
};

// A vector of floats as input and output; *length lives as long as the struct is used.
inline lightcc_tensor tensor_of(std::vector<float>& values, const int64_t* length) {
  lightcc_tensor tensor{};
  tensor.input = tensor.output = values.data();
  tensor.shape = length;
  tensor.dtype = LIGHTCC_FLOAT32;
  tensor.ndim = 1;
  return tensor;
}

inline lightcc_request request_of(int kind, const char* name, const lightcc_tensor* tensors, int count,
                                  uint32_t flags = 0) {
  lightcc_request request{};
  request.size = sizeof request;
  request.tensor_size = sizeof(lightcc_tensor);
  request.tensors = tensors;
  request.count = count;
  request.kind = kind;
  request.flags = flags;
  request.name = name;
  request.op = LIGHTCC_SUM;
  request.prescale = request.postscale = 1;
  return request;
}

}  // namespace lightcc
