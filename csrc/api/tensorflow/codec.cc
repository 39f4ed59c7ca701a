#include "api/tensorflow/codec.h"

#include <cstdio>
#include <locale>
#include <sstream>

#include "api/lightcc.h"

namespace lightcc::tf {
namespace {

template <typename Number> bool read(const std::string& text, Number* value) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  return stream >> *value && stream.peek() == EOF;
}

bool read_width(const std::string& text, int* width) {
  *width = text == "float16" ? LIGHTCC_FLOAT16 : LIGHTCC_FLOAT32;
  return text == "float16" || text == "float32";
}

bool read_part(const std::string& key, const std::string& value, CodecText* codec) {
  if (key == "name") return codec->name = value, !value.empty();
  if (codec->kind != LIGHTCC_CODEC_TOPK) return false;
  if (key == "ratio") return read(value, &codec->ratio);
  if (key == "width") return read_width(value, &codec->width);
  if (key == "warmup") return read(value, &codec->warmup_steps);
  return key == "momentum" && read(value, &codec->momentum);
}

}  // namespace

bool parse_codec(const std::string& text, CodecText* codec, std::string* why) {
  if (text.empty()) return true;
  std::istringstream words(text);
  std::string word;
  words >> word;
  *why = "the attribute codec is '" + text + "': ";
  if (word != "topk" && word != "int8" && word != "int4")
    return *why += "it begins with none of topk, int8 and int4", false;
  codec->kind = word == "topk" ? LIGHTCC_CODEC_TOPK : word == "int8" ? LIGHTCC_CODEC_INT8 : LIGHTCC_CODEC_INT4;
  codec->width = word == "topk" ? LIGHTCC_FLOAT32 : LIGHTCC_INT8;
  while (words >> word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || !read_part(word.substr(0, equals), word.substr(equals + 1), codec))
      return *why += "'" + word + "' says nothing about it", false;
  }
  if (codec->name.empty()) return *why += "it has no name", false;
  return true;
}

int id_of(const CodecText& text) {
  if (text.kind == LIGHTCC_CODEC_NONE) return 0;
  lightcc_codec codec{};
  codec.size = sizeof codec;
  codec.kind = text.kind;
  codec.width = text.width;
  codec.warmup_steps = text.warmup_steps;
  codec.ratio = text.ratio;
  codec.momentum = text.momentum;
  codec.name = text.name.c_str();
  return lightcc_register_codec(&codec);
}

}  // namespace lightcc::tf
