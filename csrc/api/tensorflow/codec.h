// The attribute `codec` of allreduces: how the core compresses them, in words, and who keeps what is left behind.
//
//   topk ratio=0.01 width=float16 warmup=100 momentum=0.9 name=<owner>
//   int8 name=<owner>
//   int4 name=<owner>
//
// All parts but the name may be left out; lightcc_codec in api/lightcc.h has their meanings and bounds.
#pragma once
#include <cstdint>
#include <string>

namespace lightcc::tf {

struct CodecText {
  int kind = 0, width = 0;  // kind LIGHTCC_CODEC_NONE: the attribute is empty
  int32_t warmup_steps = 0;
  double ratio = 1, momentum = 0;
  std::string name;
};

// False: it is no such text, and `why` says what is wrong with it.
bool parse_codec(const std::string& text, CodecText* codec, std::string* why);

// The id of the codec of this name, 0 for none, or minus a status. Asked for at each run: what was saved is loaded into
// a new codec of the same name.
int id_of(const CodecText& codec);

}  // namespace lightcc::tf
