// A registered codec: its warm-up, the residuals that it owns, and what it tells of them.
#include "engine/request/compressor.h"

#include <gtest/gtest.h>

#include "api/lightcc.h"
#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr Codec kTopK{CodecKind::topk, DType::float32, 0.001, 0};

TEST(Compressor, RefusesWhatIsNoCodec) {
  const auto refusal = [](Codec codec, int64_t warmup_steps = 0) -> std::string {
    try {
      Compressor(codec, warmup_steps);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(kTopK), "");
  EXPECT_EQ(refusal({}), "compression: none is not a codec");
  EXPECT_EQ(refusal({CodecKind::topk, DType::float32, 0, 0}), "compression: the ratio must be above 0 and at most 1");
  EXPECT_EQ(refusal({CodecKind::topk, DType::float32, 1.5, 0}), "compression: the ratio must be above 0 and at most 1");
  EXPECT_EQ(refusal({CodecKind::topk, DType::float64, 0.1, 0}), "compression: topk sends values as float32 or float16");
  EXPECT_EQ(refusal({CodecKind::topk, DType::float32, 0.1, 1}),
            "compression: the momentum must be at least 0 and below 1");
  EXPECT_EQ(refusal({CodecKind::int8, DType::float32, 1, 0}), "compression: int8 sends values as int8");
  EXPECT_EQ(refusal({CodecKind::int4, DType::float32, 1, 0}), "compression: int4 sends values in bytes, as int8");
  EXPECT_EQ(refusal(kTopK, -1), "compression: warmup_steps must be 0 or more");
}

// The stages of Lin et al. 2018: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %.
TEST(Compressor, WarmsUpInFiveStages) {
  Compressor compressor(kTopK, 10);
  const Residuals residuals = compressor.residuals(0, "w", 1);
  std::vector<double> ratios;
  for (int64_t step = 0; step < 12; ++step) {
    residuals[0]->set_steps(step);
    ratios.push_back(compressor.codec_for(residuals).ratio);
  }
  const double expected[] = {0.2512, 0.2512,  0.0631,  0.0631, 0.0158, 0.0158,
                             0.00398, 0.00398, 0.001, 0.001, 0.001, 0.001};
  for (size_t step = 0; step < ratios.size(); ++step) EXPECT_NEAR(ratios[step], expected[step], 0.0001) << step;
  EXPECT_EQ(ratios.back(), 0.001);
}

TEST(Compressor, FindsWhatItHasByGroupNameAndTensor) {
  Compressor compressor(kTopK, 0);
  const Residuals first = compressor.residuals(0, "w", 2);
  EXPECT_EQ(compressor.residuals(0, "w", 2), first);
  EXPECT_NE(compressor.residuals(1, "w", 2)[0], first[0]);
  EXPECT_EQ(compressor.find(0, "w", 1), first[1]);
  EXPECT_EQ(compressor.find(0, "w", 2), nullptr);
  EXPECT_EQ(compressor.find(0, "v", 0), nullptr);
  compressor.forget([](int group) { return group == 1; });
  EXPECT_EQ(compressor.find(1, "w", 0), nullptr);
  EXPECT_EQ(compressor.find(0, "w", 0), first[0]);
}

TEST(Compressor, TellsItsStateAsJson) {
  Compressor compressor(kTopK, 0);
  const Residuals residuals = compressor.residuals(3, "a \"name\"", 1);
  residuals[0]->cut(8, 1, 2, {{4, 2}}, false);
  residuals[0]->pieces()[0].values = {3, 4};
  residuals[0]->set_steps(7);
  residuals[0]->count(
      {.gradient_bytes = 32, .elements = 2, .sent_elements = 1, .sent_bytes = 10, .dense_sent_bytes = 8});
  compressor.set_dense("why");
  EXPECT_EQ(compressor.state(),
            R"({"gradient_bytes":32,"sent_bytes":10,"dense_sent_bytes":8,"sent_elements":1,"elements":2,"dense":"why",)"
            R"("tensors":[{"group":3,"name":"a \"name\"","tensor":0,"elements":8,"steps":7,"node":1,"nodes":2,)"
            R"("route":"host","velocity":false,"pieces":[{"first":4,"count":2,"norm":5}]}]})");
}

// Through the C API, which needs no init.
TEST(Codecs, AreRegisteredByName) {
  lightcc_codec codec{sizeof codec, LIGHTCC_CODEC_TOPK, LIGHTCC_FLOAT32, 0, 0.01, 0, nullptr};
  const int first = lightcc_register_codec(&codec), second = lightcc_register_codec(&codec);
  EXPECT_GT(first, 0);
  EXPECT_NE(first, second);
  codec.name = "tape";
  const int named = lightcc_register_codec(&codec);
  EXPECT_EQ(lightcc_register_codec(&codec), named);
  for (const int id : {first, second, named}) EXPECT_EQ(lightcc_release_codec(id), LIGHTCC_OK);
  EXPECT_EQ(lightcc_release_codec(named), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(lightcc_codec_state(named), nullptr);
  const int again = lightcc_register_codec(&codec);
  EXPECT_NE(again, named);
  lightcc_release_codec(again);
  codec.ratio = 2;
  EXPECT_EQ(lightcc_register_codec(&codec), -LIGHTCC_INVALID_ARGUMENT);
  codec.size = 8;
  EXPECT_EQ(lightcc_register_codec(&codec), -LIGHTCC_INVALID_ARGUMENT);
}

TEST(Codecs, RefuseResidualsThatTheyDoNotHave) {
  lightcc_codec codec{sizeof codec, LIGHTCC_CODEC_INT8, LIGHTCC_INT8, 0, 1, 0, nullptr};
  const int id = lightcc_register_codec(&codec);
  float values[4] = {};
  lightcc_residual residual{sizeof residual, id, 0, 0, 0, 0, "w", 4, 0, 0, 4, values};
  EXPECT_EQ(lightcc_read_residual(&residual), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(lightcc_write_residual(&residual), LIGHTCC_OK);
  residual.count = 5;
  EXPECT_EQ(lightcc_write_residual(&residual), LIGHTCC_INVALID_ARGUMENT);
  residual.count = 4;
  residual.part = 2;
  EXPECT_EQ(lightcc_write_residual(&residual), LIGHTCC_INVALID_ARGUMENT);
  lightcc_release_codec(id);
  residual.part = 0;
  EXPECT_EQ(lightcc_write_residual(&residual), LIGHTCC_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace lightcc
