// Records in slabs, and the marks by which readers of changes find them.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "embedding/slabs.h"
#include "labels.h"

LABEL(alone);

namespace lightcc::embedding {
namespace {

constexpr int kFirst = 1, kSecond = 2;  // readers

// Records that are taken, given back, changed and read at random, and what is known of each.
class Records {
 public:
  explicit Records(size_t bytes) : slabs_(bytes, 0) {}

  void take(size_t count) {
    ASSERT_TRUE(slabs_.reserve(count));
    for (size_t i = 0; i < count; ++i) {
      const uint32_t row = slabs_.take();
      slabs_.header(row)->key = row;
      slabs_.header(row)->changed = 0;
      if (row >= changed_.size()) changed_.resize(row + 1, kNotTaken);
      changed_[row] = 0;
    }
  }
  void give_back(uint32_t row) {
    slabs_.give_back(row);
    changed_[row] = kNotTaken;
  }
  void change(uint32_t row) {
    slabs_.set_changed(slabs_.at(row));
    changed_[row] = kFirst | kSecond;
  }
  // Reads, all or only those with even numbers, and expects each that had changed once and in order.
  void read(int reader, bool all) {
    const std::vector<int> before = changed_;
    slabs_.each_changed(reader, [&](RowHeader& header) {
      const uint32_t row = uint32_t(header.key);
      EXPECT_EQ(slabs_.header(row), &header);
      EXPECT_EQ(int(header.changed), changed_[row]);
      if (!(int(header.changed) & reader) || (!all && row % 2)) return (int(header.changed) & reader) != 0;
      header.changed &= unsigned(~reader) & RowHeader::kChanged;
      changed_[row] &= ~reader;
      return false;
    });
    for (uint32_t row = 0; row < before.size(); ++row) {
      const bool was_read = before[row] != kNotTaken && before[row] & reader && (all || row % 2 == 0);
      EXPECT_FALSE(was_read && changed_[row] & reader) << row << " was not found";
    }
    if (all) {
      EXPECT_EQ(slabs_.next_changed(0, reader), Slabs::kNone) << "all marks of the reader are cleared";
    }
  }
  uint32_t any(std::mt19937& random) const {
    for (;;)
      if (const uint32_t row = uint32_t(random() % changed_.size()); changed_[row] != kNotTaken) return row;
  }

 private:
  static constexpr int kNotTaken = -1;
  Slabs slabs_;
  std::vector<int> changed_;  // by row
};

TEST(EmbeddingSlabs, ReadersFindWhatHasChanged) {
  std::mt19937 random(1);
  for (const size_t bytes : {16, 80, 208, 512, 528, 8192, 1 << 20}) {
    SCOPED_TRACE(bytes);
    Records records(bytes);
    records.take(3 * ((16 << 20) / bytes) / 2);  // in two slabs
    for (int turn = 0; turn < 40; ++turn) {
      for (size_t i = 0; i < random() % 40; ++i) records.change(records.any(random));
      if (turn % 5 == 0) records.give_back(records.any(random));
      if (turn % 5 == 1) records.take(1);
      records.read(random() % 2 ? kFirst : kSecond, turn % 3 == 0);
    }
  }
}

TEST(EmbeddingSlabs, ReservedRecordsCanBeTakenThoughTheSlabWithTheirRoomWasReturned) {
  Slabs slabs(80, 0);
  ASSERT_TRUE(slabs.reserve(1));
  const uint32_t last = slabs.take();
  ASSERT_TRUE(slabs.reserve(10));
  slabs.give_back(last);
  EXPECT_EQ(slabs.mapped(), 0);
  for (int i = 0; i < 10; ++i) slabs.header(slabs.take())->key = i;
  EXPECT_EQ(slabs.mapped(), 1);
}

TEST(EmbeddingSlabs, MarksAreThoseOfRecordsThatChanged) {
  Slabs slabs(80, 0);
  ASSERT_TRUE(slabs.reserve(100'000));
  for (int i = 0; i < 100'000; ++i) slabs.header(slabs.take())->key = i;
  EXPECT_EQ(slabs.next_changed(0, kFirst), Slabs::kNone);
  slabs.set_changed(slabs.at(50'000));
  const uint32_t first = slabs.next_changed(0, kFirst);
  EXPECT_LE(first, 50'000u);
  EXPECT_GT(first, 50'000u - 8) << "records of one mark alone are looked at";
  EXPECT_EQ(slabs.next_changed(50'008, kFirst), Slabs::kNone);
}

}  // namespace
}  // namespace lightcc::embedding
