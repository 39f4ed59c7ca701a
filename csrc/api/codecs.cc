// The C API for compression: codecs, and what is left behind in error feedback.
#include <algorithm>
#include <cmath>

#include "api/global_state.h"
#include "api/lightcc.h"
#include "api/read_request.h"

namespace lightcc {
namespace {

constexpr int32_t kMostTensors = 1 << 20;

lightcc_residual read_residual(const lightcc_residual* caller) {
  if (!caller) refuse("lightcc_residual is NULL");
  lightcc_residual residual;
  read_struct(&residual, caller, caller->size, kResidualSizes, "lightcc_residual.size");
  if (!residual.name || !residual.values) refuse("lightcc_residual needs a name and values");
  if (residual.part != 0 && residual.part != 1)
    refuse("lightcc_residual.part is " + std::to_string(residual.part) + ": 0 is what is left behind, 1 its velocity");
  if (residual.tensor >= kMostTensors)
    refuse("lightcc_residual.tensor is " + std::to_string(residual.tensor) + ": no request has so many");
  if (residual.tensor < 0 || residual.first < 0 || residual.count < 0 || residual.node < 0)
    refuse("lightcc_residual of '" + std::string(residual.name) + "' has a negative number");
  return residual;
}

[[noreturn]] void not_there(const lightcc_residual& asked) {
  refuse("nothing is left behind here of " + std::to_string(asked.count) + " elements from " +
         std::to_string(asked.first) + " on of '" + asked.name + "', tensor " +
         std::to_string(asked.tensor) + ", in process set " + std::to_string(asked.group));
}

}  // namespace

std::shared_ptr<Compressor> compressor(int codec) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  const auto found = s.codecs.find(codec);
  if (found == s.codecs.end()) refuse("codec " + std::to_string(codec) + " is not registered, or was released");
  return found->second;
}

void forget_residuals(const std::function<bool(int group)>& ended) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  for (auto& [id, one] : s.codecs) one->forget(ended);
}

}  // namespace lightcc

using namespace lightcc;

extern "C" {

int lightcc_register_codec(const lightcc_codec* caller) {
  return guard(
      [&] {
        if (!caller) refuse("lightcc_codec is NULL");
        lightcc_codec from;
        read_struct(&from, caller, caller->size, kCodecSizes, "lightcc_codec.size");
        if (from.kind < 0 || from.kind >= kCodecKinds || from.width < 0 || from.width >= kDTypes)
          refuse("lightcc_codec of kind " + std::to_string(from.kind) + " and width " + std::to_string(from.width));
        auto made = std::make_shared<Compressor>(
            Codec{CodecKind(from.kind), DType(from.width), from.ratio, from.momentum}, from.warmup_steps);
        GlobalState& s = global_state();
        std::lock_guard lock(s.mutex);
        if (from.name)
          if (const auto known = s.codec_names.find(from.name); known != s.codec_names.end()) {
            if (!s.codecs.at(known->second)->is_like(*made))
              refuse("a codec named '" + std::string(from.name) + "' is registered, and is another");
            return known->second;
          }
        const int id = s.next_codec++;
        s.codecs.emplace(id, std::move(made));
        if (from.name) s.codec_names.emplace(from.name, id);
        return id;
      },
      -1);
}

int lightcc_release_codec(int codec) {
  return guard([&] {
    compressor(codec);
    GlobalState& s = global_state();
    std::lock_guard lock(s.mutex);
    s.codecs.erase(codec);
    std::erase_if(s.codec_names, [&](const auto& one) { return one.second == codec; });
    return 0;
  });
}

const char* lightcc_codec_state(int codec) {
  thread_local std::string text;
  const int status = guard([&] { return text = compressor(codec)->state(), 0; });
  return status == LIGHTCC_OK ? text.c_str() : nullptr;
}

int lightcc_read_residual(const lightcc_residual* caller) {
  return guard([&] {
    const lightcc_residual asked = read_residual(caller);
    const auto found = compressor(asked.codec)->find(asked.group, asked.name, size_t(asked.tensor));
    if (!found) not_there(asked);
    const HeldResidual residual(found);
    for (const ResidualPiece& piece : residual->pieces()) {
      const int64_t first = asked.first - piece.first;
      if (first < 0 || first > piece.count() || asked.count > piece.count() - first) continue;
      std::vector<float> room;
      const std::vector<float>& values = values_of(piece, asked.part == 1, &room);
      if (asked.count > int64_t(values.size()) - first) continue;  // it has no velocity
      std::copy_n(values.begin() + first, asked.count, asked.values);
      return 0;
    }
    not_there(asked);
  });
}

int lightcc_write_residual(const lightcc_residual* caller) {
  return guard([&] {
    const lightcc_residual from = read_residual(caller);
    if (from.elements <= 0 || from.count > from.elements - from.first || from.steps < 0)
      refuse("lightcc_residual of '" + std::string(from.name) + "' is not a part of " + std::to_string(from.elements) +
             " elements, or of a negative number of steps");
    if (!std::all_of(from.values, from.values + from.count, [](float value) { return std::isfinite(value); }))
      refuse("lightcc_residual of '" + std::string(from.name) + "' has values that are not finite");
    const auto found = compressor(from.codec)->residuals(from.group, from.name, size_t(from.tensor) + 1).back();
    const HeldResidual residual(found);
    residual->set_steps(from.steps);
    residual->add_saved(from.elements, {from.part == 1, from.node, from.first,
                                        std::vector<float>(from.values, from.values + from.count)});
    return 0;
  });
}

}  // extern "C"
