// The tables that numbers in graphs stand for (bind.h). Any thread.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "api/tensorflow/c_api.h"
#include "embedding/tensorflow/bind.h"

namespace lightcc::tf {

struct BoundTable {
  int64_t number = 0;
  lightcc_embedding_group* group = nullptr;
  lightcc_embedding_table* table = nullptr;
  std::string name;
  DataType dtype = kFloat;
  int64_t dim = 0;
  size_t row_bytes() const { return size_t(dim) * (dtype == kDouble ? sizeof(double) : sizeof(float)); }
};

// Reads the attribute `tables` of an operation: numbers with spaces between them.
std::vector<int64_t> parse_numbers(const std::string& text);

// The tables of these numbers, which are all of one group. False: `why` says what is wrong.
bool find_tables(const std::vector<int64_t>& numbers, std::vector<BoundTable>* tables, std::string* why);

}  // namespace lightcc::tf
