// What callers hand to an engine.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "base/types.h"

namespace lightcc {

struct Request;  // request.h
using RequestPtr = std::shared_ptr<Request>;

struct Callbacks {
  void (*done)(void* context, int status, const char* text) = nullptr;
  void* (*allocate)(void* context, int index, const int64_t* shape, int ndim) = nullptr;
  void* context = nullptr;
  void (*received)(void* context, int index, const int32_t* rows, int count) = nullptr;  // alltoall, before done
};

struct Call {                    // an allreduce of one tensor, as lightcc_submit() gets it; outlives the call only
  int group;
  const char* name;              // nullptr: automatic
  const void* input;
  void* output;
  DType dtype;
  std::span<const int64_t> shape;
  ReduceOp op;
  double pre, post;
  Callbacks callbacks = {};      // for what is begun here and ends elsewhere
};

struct Fill {
  RequestPtr request;              // not submitted
  const void* from;                // as many bytes as its tensor has, on its device
};

}  // namespace lightcc
