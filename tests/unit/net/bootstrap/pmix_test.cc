// The broadcast by PMIx over a library of the tests' own (doubles/pmix_double.cc), in processes of their own: it is
// loaded until a process ends.
#include "net/bootstrap/pmix.h"

#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/error.h"
#include "unit/child.h"
#include "unit/helpers.h"
#include "labels.h"

LABEL(alone, "As/Pmix.*/Child:PmixChild.*");

namespace lightcc {
namespace {

constexpr int kDescriptors = 100;

// "<version> <note>", or the error behind its code.
std::string broadcast(PmixClient how, const std::string& key, const std::string& note, uint64_t ms = 20'000,
                      const std::string& library = PMIX_DOUBLE) {
  try {
    const PmixNote got = broadcast_by_pmix(library, how, key, {0, 1, 2}, note, in_ms(ms));
    return got.version + " " + got.note;
  } catch (const Error& error) {
    return std::to_string(int(error.code())) + " " + error.what();
  }
}
std::string in_process(const std::function<std::string()>& body) { return Child(kDescriptors, body).said(); }

class Pmix : public testing::TestWithParam<PmixClient> {};
INSTANTIATE_TEST_SUITE_P(As, Pmix, testing::Values(PmixClient::itself, PmixClient::child),
                         [](auto& info) { return info.param == PmixClient::itself ? "Itself" : "Child"; });

const std::string kInternal = std::to_string(int(Code::internal)) + " ";
const std::string kTimeout = std::to_string(int(Code::timeout)) + " ";
const std::string kWithout = "; set LIGHTCC_STORE_ADDR=host:port on all ranks (mpirun -x) to do without PMIx";

TEST_P(Pmix, TheNoteComesBackWithTheVersion) {
  const std::string note(60 << 10, 'n');
  EXPECT_EQ(in_process([&] { return broadcast(GetParam(), "key", note); }), "4.2.2rc1 " + note);
}

TEST_P(Pmix, OneBroadcastAfterAnother) {
  EXPECT_EQ(in_process([&] {
              return broadcast(GetParam(), "first", "1") + ", " + broadcast(GetParam(), "second", "2");
            }),
            "4.2.2rc1 1, 4.2.2rc1 2");
}

TEST_P(Pmix, TheCallThatFailsIsNamedAndTheNextBroadcastWorks) {
  const std::pair<const char*, const char*> rows[] = {{"put fails", "PMIx_Put"}, {"commit fails", "PMIx_Commit"}};
  for (const auto& [key, call] : rows)
    EXPECT_EQ(in_process([&, key = key] {
                return broadcast(GetParam(), key, "note") + "\n" + broadcast(GetParam(), "key", "note");
              }),
              kInternal + "init: " + call + " of mpirun's PMIx library says NOT-FOUND (-46)" + kWithout +
                  "\n4.2.2rc1 note");
  EXPECT_EQ(in_process([&] { return broadcast(GetParam(), "is no text", "note"); }),
            kInternal + "init: mpirun's PMIx server lost rank 0's note" + kWithout);
}

TEST_P(Pmix, ACallThatDoesNotReturnIsATimeout) {
  const std::string text = in_process([&] { return broadcast(GetParam(), "hangs", "note", 200); });
  EXPECT_TRUE(text.starts_with(kTimeout + "init: not all ranks called init before HOROVOD_START_TIMEOUT")) << text;
}

TEST_P(Pmix, ALibraryThatIsNotThereOrIsAnotherIsNamed) {
  const std::string none = in_process([&] { return broadcast(GetParam(), "key", "", 20'000, "libno-such.so.9"); });
  EXPECT_TRUE(none.starts_with(kInternal + "init: mpirun's PMIx library cannot be opened: libno-such.so.9")) << none;
  const std::string other = in_process([&] { return broadcast(GetParam(), "key", "", 20'000, "libm.so.6"); });
  EXPECT_EQ(other, kInternal + "init: libm.so.6 has no PMIx_Init" + kWithout);
}

TEST(PmixChild, ACrashOfTheLibraryIsAnError) {
  EXPECT_EQ(in_process([] {
              const std::string first = broadcast(PmixClient::child, "crashes", "note");
              return first + "\n" + broadcast(PmixClient::child, "key", "note");
            }),
            kInternal + "init: " PMIX_DOUBLE " crashed when it asked mpirun's PMIx server" + kWithout +
                "\n4.2.2rc1 note");
}

TEST(PmixLibrary, IsTheOneThatThisProcessHasMapped) {
  EXPECT_EQ(pmix_library(getpid()), "libpmix.so.2");
}

}  // namespace
}  // namespace lightcc
