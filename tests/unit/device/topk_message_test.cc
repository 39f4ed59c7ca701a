// The body of a top-k message: what is written is added up again, and nothing else is.
#include "device/topk_message.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr DType kTypes[] = {DType::float32, DType::float16};

std::vector<std::byte> body_of(const TopKSelected& selected, size_t count, DType type, size_t piece) {
  std::vector<std::byte> body(topk_message_bytes(count, selected.indices.size(), type));
  for (size_t at = 0; at < selected.indices.size(); at += piece) {
    write_topk_message(selected, type, at, std::min(at + piece, selected.indices.size()), body.data());
  }
  return body;
}

void add_all(const TopKMessage& message, std::vector<float>& out) {
  for (size_t b = 0; b < message.blocks(); ++b) message.add_to(out.data(), b);
}

// What is sent and what is left behind is the sum, whoever gets it; bodies lie at any address.
TEST(TopKMessage, CarriesWhatWasSelected) {
  for (DType type : kTypes) {
    for (size_t count : {1, 100, 65536, 65537, 200'000}) {
      for (size_t k : {size_t(1), (count + 99) / 100, count}) {
        std::mt19937_64 random(count + k);
        std::normal_distribution<float> normal;
        std::vector<float> gradient(count), sums, residual(count, 0);
        for (float& x : gradient) x = normal(random);
        sums = gradient;
        TopKSelection selection;
        TopKWarmStart warm;
        selection.start({gradient.data(), residual.data(), count, k, 1, type}, warm);
        while (selection.step()) {}
        const auto body = body_of(selection.selected(), count, type, k);
        EXPECT_EQ(body, body_of(selection.selected(), count, type, k / 3 + 1)) << "written in pieces";
        for (size_t shift : {0, 1}) {
          std::vector<std::byte> shifted(body.size() + shift);
          std::copy(body.begin(), body.end(), shifted.begin() + int64_t(shift));
          const TopKMessage message(ConstSpan(shifted).subspan(shift), count, type);
          EXPECT_EQ(k, message.k());
          std::vector<float> out(count, 0);
          add_all(message, out);
          for (size_t i = 0; i < count; ++i) ASSERT_EQ(sums[i], out[i] + residual[i]) << i << " of " << count;
          std::vector<float> twice = out;
          add_all(message, twice);
          for (size_t i = 0; i < count; ++i) ASSERT_EQ(2 * out[i], twice[i]) << "it adds, " << i << " of " << count;
        }
      }
    }
  }
}

TEST(TopKMessage, SendsNoFiniteNumberAsInfinity) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(0x7bff, send_float16(65504));
  EXPECT_EQ(0x7bff, send_float16(65519));
  EXPECT_EQ(0x7bff, send_float16(65520)) << "would round to infinity";
  EXPECT_EQ(0xfbff, send_float16(-1e38f));
  EXPECT_EQ(0x7c00, send_float16(infinity));
  EXPECT_EQ(0xfc00, send_float16(-infinity));
  EXPECT_EQ(0x7bff, send_float16(65503));
  EXPECT_EQ(0x7bfe, send_float16(65472));
  EXPECT_EQ(0x3c00, send_float16(1));
  EXPECT_TRUE(std::isnan(float_of_float16(send_float16(std::numeric_limits<float>::quiet_NaN()))));
}

// ---- what is malformed

struct Parts {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> indices;
  std::vector<float> values;
};
constexpr size_t kCount = 65536 + 100;
const Parts kGood{{3, 2}, {0, 7, 65535, 5, 99}, {1, 2, 3, 4, 5}};

std::vector<std::byte> bytes_of(const Parts& parts) {
  std::vector<std::byte> body;
  const auto append = [&](const auto& all) {
    const auto bytes = std::as_bytes(std::span(all));
    body.insert(body.end(), bytes.begin(), bytes.end());
  };
  append(parts.counts);
  append(parts.indices);
  append(parts.values);
  return body;
}

void expect_refused(const std::vector<std::byte>& body, const std::string& what, DType type = DType::float32) {
  std::vector<float> row(kCount + 70'000, 42);  // an index that is believed would land in it
  try {
    const TopKMessage message(body, kCount, type);
    for (size_t b = 0; b < message.blocks(); ++b) message.add_to(row.data(), b);
    ADD_FAILURE() << what << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(Code::internal, error.code());
    EXPECT_NE(std::string(error.what()).find("malformed"), std::string::npos) << error.what();
  }
  for (size_t i = kCount; i < row.size(); ++i) ASSERT_EQ(42, row[i]) << what << ": wrote behind the piece";
}

TEST(TopKMessage, OfAnotherLengthIsRefused) {
  const auto good = bytes_of(kGood);
  std::vector<float> out(kCount, 0);
  add_all(TopKMessage(good, kCount, DType::float32), out);
  EXPECT_EQ(3, out[65535]);
  EXPECT_EQ(5, out[kCount - 1]);
  for (size_t size = 0; size < good.size(); ++size) {
    expect_refused({good.begin(), good.begin() + int64_t(size)}, std::to_string(size) + " bytes");
  }
  auto longer = good;
  longer.push_back({});
  expect_refused(longer, "a byte more");
  expect_refused(good, "another type", DType::float16);
}

TEST(TopKMessage, WithWrongCountsOrIndicesIsRefused) {
  const auto changed = [](auto change) {
    Parts parts = kGood;
    change(parts);
    return bytes_of(parts);
  };
  expect_refused(changed([](Parts& p) { p.counts = {2, 2}; }), "too small a count");
  expect_refused(changed([](Parts& p) { p.counts = {4, 2}; }), "too large a count");
  expect_refused(changed([](Parts& p) { p.counts = {0xffffffff, 6}; }), "counts whose sum overflows");
  expect_refused(changed([](Parts& p) { p.counts = {65537, 2}; }), "more than a block has");
  expect_refused(changed([](Parts& p) { p.counts = {0, 101}; }), "more than the last block has");
  expect_refused(changed([](Parts& p) { p.counts = {2, 3}; }), "an index in another block, descending");
  expect_refused(changed([](Parts& p) { p.indices[1] = 0; }), "an index twice");
  expect_refused(changed([](Parts& p) { p.indices[3] = 100, p.indices[4] = 101; }), "indices beyond the piece");
  expect_refused(changed([](Parts& p) { p.indices[4] = 100; }), "an index just beyond the piece");
  expect_refused(changed([](Parts& p) { p.indices[4] = 4; }), "a descending index");
}

TEST(TopKMessage, OfOtherTypesIsRefused) {
  EXPECT_THROW(topk_message_bytes(1, 1, DType::float64), Error);
  EXPECT_THROW(TopKMessage(ConstSpan(), 0, DType::bfloat16), Error);
}

}  // namespace
}  // namespace lightcc
