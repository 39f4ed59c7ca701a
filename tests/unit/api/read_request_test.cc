// The structs of the C API: what the library takes of any caller's, and what it refuses, naming the field.
#include "api/read_request.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "unit/api_requests.h"

namespace lightcc {
namespace {

// ---- what was published once stays: programs that were compiled with it are out there

static_assert(offsetof(lightcc_tensor, input) == 0);
static_assert(offsetof(lightcc_tensor, output) == 8);
static_assert(offsetof(lightcc_tensor, shape) == 16);
static_assert(offsetof(lightcc_tensor, dtype) == 24);
static_assert(offsetof(lightcc_tensor, ndim) == 28);
static_assert(offsetof(lightcc_tensor, place) == 32);
static_assert(offsetof(lightcc_place, device) == 0);
static_assert(offsetof(lightcc_place, kind) == 4);
static_assert(offsetof(lightcc_place, stream) == 8);

static_assert(offsetof(lightcc_request, size) == 0);
static_assert(offsetof(lightcc_request, tensor_size) == 4);
static_assert(offsetof(lightcc_request, tensors) == 8);
static_assert(offsetof(lightcc_request, count) == 16);
static_assert(offsetof(lightcc_request, kind) == 20);
static_assert(offsetof(lightcc_request, flags) == 24);
static_assert(offsetof(lightcc_request, group) == 28);
static_assert(offsetof(lightcc_request, name) == 32);
static_assert(offsetof(lightcc_request, op) == 40);
static_assert(offsetof(lightcc_request, root) == 44);
static_assert(offsetof(lightcc_request, prescale) == 48);
static_assert(offsetof(lightcc_request, postscale) == 56);
static_assert(offsetof(lightcc_request, splits) == 64);
static_assert(offsetof(lightcc_request, codec) == 72);
static_assert(offsetof(lightcc_request, set) == 76);
static_assert(offsetof(lightcc_request, done) == 80);
static_assert(offsetof(lightcc_request, allocate) == 88);
static_assert(offsetof(lightcc_request, received) == 96);
static_assert(offsetof(lightcc_request, context) == 104);
static_assert(offsetof(lightcc_request, tag) == 112);
static_assert(offsetof(lightcc_request, space) == 116);
static_assert(kRequestSizes[0] == 112 && kTensorSizes[0] == 48);

// ---- a struct that has had three versions

using Bytes = std::vector<uint8_t>;
constexpr uint32_t kSizes[] = {4, 8, 12};

Bytes read(const Bytes& caller) {
  Bytes read(12, 0xff);
  read_struct(read.data(), caller.data(), uint32_t(caller.size()), kSizes, "sample.size");
  return read;
}

std::string refusal_of(const Bytes& caller) {
  try {
    read(caller);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "";
}

TEST(ReadStruct, TakesEveryPublishedSizeAndZerosTheRest) {
  EXPECT_EQ(read({1, 2, 3, 4}), (Bytes{1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(read({1, 2, 3, 4, 5, 6, 7, 8}), (Bytes{1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0}));
  EXPECT_EQ(read({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}), (Bytes{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
}

TEST(ReadStruct, TakesALargerOneWhoseTailIsZero) {
  Bytes larger(4096);
  larger[11] = 12;
  EXPECT_EQ(read(larger), (Bytes{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12}));
  for (size_t at : {size_t(12), larger.size() - 1}) {
    Bytes unknown(larger);
    unknown[at] = 1;
    EXPECT_EQ(refusal_of(unknown), "sample.size is 4096, and what follows the 12 bytes that this version of lightcc "
                                   "knows is not zero: a newer one is needed");
  }
}

TEST(ReadStruct, RefusesSizesThatNoVersionHas) {
  for (size_t size : {0, 3, 5, 11, 4097})
    EXPECT_EQ(refusal_of(Bytes(size)), "sample.size is " + std::to_string(size) +
                                           ", which no version has: it must be 4, 8, 12, or up to 4096 if the rest is "
                                           "zero");
}

// ---- the C API's two structs

// Callers of a later version, whose structs have one field more.
struct LaterTensor {
  lightcc_tensor known;
  int64_t more;
};
struct LaterRequest {
  lightcc_request known;
  int64_t more;
};

struct RequestStruct : Api {
  std::vector<float> x{1, 2}, y{3, 4, 5};
  const std::array<int64_t, 2> lengths{2, 3};
  std::array<lightcc_tensor, 2> tensors{tensor_of(x, &lengths[0]), tensor_of(y, &lengths[1])};
  lightcc_request request = request_of(LIGHTCC_ALLREDUCE, "w", tensors.data(), 2, LIGHTCC_BLOCK);

  // The text says what is wrong with the changed request; the next one, which is in order, works.
  void expect_refused(const std::function<void()>& change, const std::string& text,
                      int64_t (*function)(const lightcc_request*) = lightcc_submit) {
    const auto request_before = request;
    const auto tensors_before = tensors;
    change();
    EXPECT_EQ(function(&request), -LIGHTCC_INVALID_ARGUMENT) << text;
    EXPECT_EQ(lightcc_error(), text);
    request = request_before;
    tensors = tensors_before;
    EXPECT_EQ(lightcc_submit(&request), 0) << lightcc_error();
  }
};

TEST_F(RequestStruct, OneAndManyAreOneCall) {
  request.prescale = 2;
  EXPECT_EQ(lightcc_submit(&request), 0) << lightcc_error();
  EXPECT_EQ(x, (std::vector<float>{2, 4}));
  EXPECT_EQ(y, (std::vector<float>{6, 8, 10}));
  request.count = 1;
  EXPECT_EQ(lightcc_submit(&request), 0) << lightcc_error();
  EXPECT_EQ(x, (std::vector<float>{4, 8}));
  EXPECT_EQ(y, (std::vector<float>{6, 8, 10}));
}

TEST_F(RequestStruct, ALaterCallerIsServedAsLongAsItAsksForNothingNew) {
  LaterTensor later[2] = {{tensors[0], 0}, {tensors[1], 0}};
  LaterRequest caller{request, 0};
  caller.known.size = sizeof caller;
  caller.known.tensor_size = sizeof(LaterTensor);
  caller.known.tensors = &later[0].known;
  caller.known.prescale = 2;
  for (int count : {1, 2}) {
    caller.known.count = count;
    EXPECT_EQ(lightcc_submit(&caller.known), 0) << lightcc_error();
  }
  EXPECT_EQ(x, (std::vector<float>{4, 8}));
  EXPECT_EQ(y, (std::vector<float>{6, 8, 10}));

  caller.more = 1;
  EXPECT_EQ(lightcc_submit(&caller.known), -LIGHTCC_INVALID_ARGUMENT);
  EXPECT_STREQ(lightcc_error(), "lightcc_request.size is 128, and what follows the 120 bytes that this version of "
                                "lightcc knows is not zero: a newer one is needed");
  caller.more = 0;
  later[1].more = 1;
  EXPECT_EQ(lightcc_submit(&caller.known), -LIGHTCC_INVALID_ARGUMENT);
  EXPECT_STREQ(lightcc_error(), "lightcc_request.tensor_size is 56, and what follows the 48 bytes that this version of "
                                "lightcc knows is not zero: a newer one is needed");
  later[1].more = 0;
  EXPECT_EQ(lightcc_submit(&caller.known), 0) << lightcc_error();
}

TEST_F(RequestStruct, ARefusalNamesTheField) {
  for (auto function : {lightcc_submit, lightcc_prepare}) {
    const auto refused = [&](const std::function<void()>& change, const std::string& text) {
      expect_refused(change, text, function);
    };
    refused([&] { request.size = 0; }, "lightcc_request.size is 0, which no version has: it must be 112, 120, or up to "
                                       "4096 if the rest is zero");
    refused([&] { request.size = 111; }, "lightcc_request.size is 111, which no version has: it must be 112, 120, or "
                                         "up to 4096 if the rest is zero");
    refused([&] { request.tensor_size = 47; }, "lightcc_request.tensor_size is 47, which no version has: it must be "
                                               "48, or up to 4096 if the rest is zero");
    refused([&] { request.tensors = nullptr; }, "lightcc_request.tensors is NULL, but count is 2");
    refused([&] { request.flags = 13; },
            "lightcc_request.flags has 8, which this version of lightcc does not know");
    refused([&] { request.set = -1; }, "lightcc_request.set is -1, which is negative");
    refused([&] { request.kind = LIGHTCC_RECV + 1; }, "unknown kind of request 8");
    refused([&] { request.kind = LIGHTCC_SEND; }, "send of tensor 'w' to rank 0 (tag 0): 2 tensors");
    refused([&] { request.op = -1; }, "unknown reduce op -1");
    refused([&] { request.count = 0; }, "allreduce of tensor 'w': 0 tensors");
    refused([&] { request.count = -1; }, "allreduce of tensor 'w': -1 tensors");
    refused([&] { request.kind = LIGHTCC_BARRIER; }, "barrier 'w': 2 tensors");
    for (int count : {1, 2}) {
      const int last = count - 1;
      const auto refused_tensor = [&](const std::function<void(lightcc_tensor&)>& change, const std::string& text) {
        const auto change_last = [&] {
          request.count = count;
          change(tensors[size_t(last)]);
        };
        refused(change_last, text);
      };
      const std::string place = "lightcc_tensor.place of tensor " + std::to_string(last);
      const std::string of_host = place + " is in the host's memory, and yet has a device or a stream";
      refused_tensor([](lightcc_tensor& tensor) { tensor.place.device = 1; }, of_host);
      refused_tensor([&](lightcc_tensor& tensor) { tensor.place.stream = &x; }, of_host);
      refused_tensor([](lightcc_tensor& tensor) { tensor.place.kind = 2; },
                     place + ".kind is none that this version of lightcc knows");
      if (last > 0)
        refused_tensor([](lightcc_tensor& tensor) { tensor.place = {0, LIGHTCC_CUDA, nullptr}; },
                       "allreduce of tensor 'w': its tensors are not all on one device, or not of one stream");
      refused_tensor([](lightcc_tensor& tensor) { tensor.dtype = 13; }, "allreduce of tensor 'w': unknown dtype 13");
      refused_tensor([](lightcc_tensor& tensor) { tensor.dtype = -1; }, "allreduce of tensor 'w': unknown dtype -1");
      refused_tensor([](lightcc_tensor& tensor) { tensor.ndim = -1; }, "allreduce of tensor 'w': ndim is -1");
      refused_tensor([](lightcc_tensor& tensor) { tensor.shape = nullptr; },
                     "allreduce of tensor 'w': no shape of 1 dimensions");
      refused_tensor([](lightcc_tensor& tensor) { tensor.output = nullptr; },
                     "allreduce of tensor 'w' needs output memory");
    }
    EXPECT_EQ(function(nullptr), -LIGHTCC_INVALID_ARGUMENT);
    EXPECT_STREQ(lightcc_error(), "lightcc_request is NULL");
  }
}

TEST_F(RequestStruct, WhatIsPreparedHasANameAndAHandle) {
  const auto prepare_refused = [&](const std::function<void()>& change, const std::string& text) {
    expect_refused(change, text, lightcc_prepare);
  };
  prepare_refused([&] { request.name = nullptr; }, "a prepared request needs a name");
  const std::string callbacks = "a prepared request has no callbacks";
  prepare_refused([&] { request.done = [](void*, int, const char*) {}; }, callbacks);
  prepare_refused([&] { request.received = [](void*, int, const int32_t*, int) {}; }, callbacks);
  prepare_refused([&] { request.allocate = [](void*, int, const int64_t*, int) -> void* { return nullptr; }; },
                  callbacks);
}

void start_and_finish(int64_t prepared) {
  const int64_t handle = lightcc_start(prepared);
  ASSERT_GT(handle, 0) << lightcc_error();
  ASSERT_EQ(lightcc_finish(handle, 10'000), LIGHTCC_OK) << lightcc_error();
}

TEST_F(RequestStruct, IsPreparedOnceAndStartedOften) {
  request.prescale = 2;
  const int64_t both = lightcc_prepare(&request);
  ASSERT_GT(both, 0) << lightcc_error();
  request.count = 1;
  request.name = "v";
  const int64_t one = lightcc_prepare(&request);
  ASSERT_GT(one, 0) << lightcc_error();
  const lightcc_request barrier = request_of(LIGHTCC_BARRIER, "b", nullptr, 0);
  const int64_t none = lightcc_prepare(&barrier);
  ASSERT_GT(none, 0) << lightcc_error();
  tensors = {};  // nothing of a request is used after the call
  request = {};
  for (int turn = 0; turn < 2; ++turn)
    for (int64_t prepared : {both, one, none}) start_and_finish(prepared);
  EXPECT_EQ(x, (std::vector<float>{16, 32}));
  EXPECT_EQ(y, (std::vector<float>{12, 16, 20}));
  for (int64_t prepared : {both, one, none}) EXPECT_EQ(lightcc_discard(prepared), LIGHTCC_OK);
}

TEST_F(RequestStruct, ThatIsPreparedIsFilledInPlace) {
  const int64_t both = lightcc_prepare(&request);
  request.count = 1;
  request.name = "v";
  tensors[0].input = tensors[0].output;
  const int64_t in_place = lightcc_prepare(&request);
  ASSERT_GT(in_place, 0) << lightcc_error();
  std::vector<float> from(x.size(), 7);
  const int64_t twice[] = {in_place, in_place};
  const void* const sources[] = {from.data(), nullptr};
  ASSERT_EQ(lightcc_fill_all(twice, sources, 2), LIGHTCC_OK) << lightcc_error();
  EXPECT_EQ(x, from);
  start_and_finish(in_place);
  EXPECT_EQ(x, from);
  EXPECT_EQ(lightcc_fill_all(&both, sources, 1), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_STREQ(lightcc_error(), "allreduce of tensor 'w' cannot be filled: it is not one tensor in place");
  for (int64_t prepared : {both, in_place}) EXPECT_EQ(lightcc_discard(prepared), LIGHTCC_OK);
  EXPECT_EQ(lightcc_fill_all(&in_place, sources, 1), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(lightcc_error()).find("unknown prepared request "), 0u);
}

}  // namespace
}  // namespace lightcc
