#include "harp_plugin/tools/bench/pattern.h"

#include <cstring>
#include <string>

#include "base/error.h"

namespace harp::bench {
namespace {

constexpr size_t kWord = sizeof(uint64_t), kStride = 16384;

uint64_t word_of(uint64_t number, size_t at) {  // splitmix64, of Steele, Lea and Flood
  uint64_t z = number * 0x9e3779b97f4a7c15u + at;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

template <class Visit>
void each_place(size_t bytes, bool full, Visit visit) {
  const size_t stride = full ? kWord : kStride;
  for (size_t at = sizeof(Mark); at + kWord <= bytes; at += stride) visit(at);
  visit(bytes - kWord);
}

}  // namespace

void stamp(uint8_t* message, size_t bytes, Mark mark, bool full) {
  each_place(bytes, full, [&](size_t at) {
    const uint64_t word = word_of(mark.number, at);
    std::memcpy(message + at, &word, kWord);
  });
  std::memcpy(message, &mark, sizeof mark);
}

Mark verify(const uint8_t* message, size_t bytes, uint64_t number, bool full) {
  Mark mark;
  if (bytes < sizeof mark + kWord)
    throw lightcc::Error(lightcc::Code::internal, "a message of " + std::to_string(bytes) + " bytes has come");
  std::memcpy(&mark, message, sizeof mark);
  if (mark.number != number || mark.phase > Phase::last)
    throw lightcc::Error(lightcc::Code::internal, "message " + std::to_string(number) + " of " + std::to_string(bytes) +
                                                      " bytes came as number " + std::to_string(mark.number));
  // The last word is written last where places overlap, so it is the one to hold.
  each_place(bytes, full, [&](size_t at) {
    uint64_t word;
    std::memcpy(&word, message + at, kWord);
    const bool overlaps_last = at != bytes - kWord && at + kWord > bytes - kWord;
    if (!overlaps_last && word != word_of(number, at))
      throw lightcc::Error(lightcc::Code::internal, "message " + std::to_string(number) + " of " +
                                                        std::to_string(bytes) + " bytes is wrong at byte " +
                                                        std::to_string(at));
  });
  return mark;
}

}  // namespace harp::bench
