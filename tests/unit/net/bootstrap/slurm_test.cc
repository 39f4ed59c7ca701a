// Slurm's short lists, as its manual writes them.
#include "net/bootstrap/slurm.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Names = std::vector<std::string>;

TEST(Slurm, HostListsAreExpanded) {
  EXPECT_EQ(expand_hosts("x"), Names{"x"});
  EXPECT_EQ(expand_hosts("node[01-04,7],x"), (Names{"node01", "node02", "node03", "node04", "node7", "x"}));
  EXPECT_EQ(expand_hosts("n[8-11]"), (Names{"n8", "n9", "n10", "n11"}));
  EXPECT_EQ(expand_hosts("n[098-101]-ib"), (Names{"n098-ib", "n099-ib", "n100-ib", "n101-ib"}));
  EXPECT_EQ(expand_hosts("r[1-2]n[3,5]"), (Names{"r1n3", "r1n5", "r2n3", "r2n5"}));
  EXPECT_EQ(expand_hosts("a.example.org,b-2"), (Names{"a.example.org", "b-2"}));
}

TEST(Slurm, TaskCountsAreExpanded) {
  EXPECT_EQ(tasks_per_node("4"), (std::vector<int>{4}));
  EXPECT_EQ(tasks_per_node("2(x3),1"), (std::vector<int>{2, 2, 2, 1}));
}

TEST(Slurm, OtherTextIsRefused) {
  for (const char* list : {"", ",", "a,", "a[1", "a]1", "a[]", "a[x]", "a[3-1]", "a[1-]", "a][1", "a[1[2]]",
                           "a[0-999999999]", "a[1-9999]b[1-9999]", "a[1-99999],b[1-99999]"})
    EXPECT_THROW(expand_hosts(list), Error) << list;
  for (const char* list : {"", "x", "2(x3", "2(x)", "2(xx)", "1,", "2(x999999999)", "-1", "2(y3)"})
    EXPECT_THROW(tasks_per_node(list), Error) << list;
}

}  // namespace
}  // namespace lightcc
