// Labels of tests: in which worlds they run again, and where they are left out. A label stands in its tests' file,
// behind the includes:
//   LABEL(on_hosts);                        all tests of this file
//   LABEL(alone, "Half.*:Types/Reduce.*");  those whose full names match, as in GoogleTest's filter: * is any text, and
//                                           behind a - stands what is not meant
// `unit_tests --labels=on_hosts,-alone` runs what has all these labels and none of those with a minus.
#pragma once
#include <string>

namespace lightcc::test {

namespace labels {
// The engine's tests that hold wherever its ranks are; they run again with TCP, HARP and a network plugin between them.
inline constexpr char on_hosts[] = "on_hosts";
// What only ranks of one host have, as shared memory, and tests that name their hosts themselves.
inline constexpr char as_placed[] = "as_placed";
// The network has a descriptor on which one can watch, which NCCL's plugins have not.
inline constexpr char watches_network[] = "watches_network";
// No thread meets another, so ThreadSanitizer has nothing to find; or forked processes fork, and it takes locks for
// held. Where a whole file has it, the file is not compiled for ThreadSanitizer (CMakeLists.txt).
inline constexpr char alone[] = "alone";
// The test only waits or counts, which no sanitizer makes any wiser.
inline constexpr char idle[] = "idle";
// No descriptor is left: UBSan cannot look at an object then, and reports it.
inline constexpr char no_descriptors[] = "no_descriptors";
}  // namespace labels

struct Label {
  // names: "" for all tests of the file.
  Label(const char* label, const char* file, const char* names = "");
};

// Of the test that runs now.
bool has_label(const std::string& label);

// Has GoogleTest run only what --labels=... says. False, after it has said why, if that names no label, or a label of a
// file stands for no test.
bool choose_by_labels(int argc, char** argv);

}  // namespace lightcc::test

#define LABEL_NAMED(name, label, ...) \
  static const ::lightcc::test::Label name(::lightcc::test::labels::label, __FILE__ __VA_OPT__(, ) __VA_ARGS__)
#define LABEL_NUMBERED(number, ...) LABEL_NAMED(label_##number, __VA_ARGS__)
#define LABEL_EXPANDED(number, ...) LABEL_NUMBERED(number, __VA_ARGS__)
#define LABEL(...) LABEL_EXPANDED(__COUNTER__, __VA_ARGS__)
