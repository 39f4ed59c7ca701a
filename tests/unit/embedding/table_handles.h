// Tables of the C API for tests: several ranks of one group in one process, whose messages meet in memory.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "embedding/handles.h"

namespace lightcc::embedding::test {

// The alltoalls of ranks that a test runs one after the other: one is done when all ranks have submitted it.
class Hub {
 public:
  explicit Hub(int size) : size_(size) {}
  std::unique_ptr<Alltoalls> of(int rank) { return std::make_unique<Rank>(*this, rank); }
  int64_t messages = 0, bytes = 0;
  size_t most_bytes = SIZE_MAX;  // there is no memory for a larger message

 private:
  struct Meeting { std::vector<std::vector<std::string>> segments; int came = 0, taken = 0; };

  class Message : public PendingMessage {
   public:
    Message(Hub& hub, int rank, std::string name) : hub_(hub), rank_(rank), name_(std::move(name)) {}
    bool finish(int) override {
      if (done_) return true;
      Meeting& meeting = hub_.meetings_[name_];
      if (meeting.came < hub_.size_) return false;
      std::string all;
      for (auto& from : meeting.segments) {
        received.push_back(int32_t(from[size_t(rank_)].size()));
        all += from[size_t(rank_)];
      }
      std::memcpy(incoming.reserve(all.size() + 1), all.data(), all.size());
      if (++meeting.taken == hub_.size_) hub_.meetings_.erase(name_);
      return done_ = true;
    }

   private:
    Hub& hub_;
    int rank_;
    std::string name_;
    bool done_ = false;
  };

  class Rank : public Alltoalls {
   public:
    Rank(Hub& hub, int rank) : hub_(hub), rank_(rank) {}
    std::byte* outgoing(size_t bytes) override {
      if (bytes > hub_.most_bytes) throw std::bad_alloc();
      return new std::byte[bytes + 1];
    }
    void give_back(std::byte* memory) override { delete[] memory; }
    std::unique_ptr<PendingMessage> alltoall(const std::string& name, const OutgoingSegments& out) override {
      const std::string own = name + "#" + std::to_string(used_[name]++);  // a name may be used again
      Meeting& meeting = hub_.meetings_[own];
      meeting.segments.resize(size_t(hub_.size_));
      const char* at = reinterpret_cast<const char*>(out.data);
      for (int32_t bytes : out.bytes) {
        meeting.segments[size_t(rank_)].emplace_back(at, size_t(bytes));
        at += bytes;
        hub_.bytes += bytes;
      }
      ++meeting.came;
      ++hub_.messages;
      return std::make_unique<Message>(hub_, rank_, own);
    }

   private:
    Hub& hub_;
    int rank_;
    std::map<std::string, int> used_;
  };

  int size_;
  std::map<std::string, Meeting> meetings_;
};

struct Spec {
  std::string name = "t";
  int64_t dim = 4;
  int dtype = LIGHTCC_FLOAT64;
  int init = LIGHTCC_EMBEDDING_UNIFORM;
  double a = -1, b = 1;
  uint64_t seed = 7;
  int wire = 0;
  int checked = 0;
  int64_t limit_bytes = 0;
  int rule = LIGHTCC_EMBEDDING_SGD;
  double initial = 0;
  int terms = 0;
};

inline lightcc_embedding_table* make_table(lightcc_embedding_group* group, const Spec& s) {
  lightcc_embedding_options o{};
  o.size = sizeof o;
  o.name = s.name.c_str();
  o.dim = s.dim, o.dtype = s.dtype, o.init = s.init, o.a = s.a, o.b = s.b, o.seed = s.seed;
  o.wire = s.wire, o.checked = s.checked, o.limit_bytes = s.limit_bytes;
  lightcc_embedding_table* table = nullptr;
  EXPECT_EQ(lightcc_embedding_create(group, &o, &table), 0) << lightcc_embedding_error();
  lightcc_embedding_rule rule{sizeof(lightcc_embedding_rule), s.rule, s.initial, s.terms, 0};
  EXPECT_EQ(lightcc_embedding_attach(table, &rule), 0) << lightcc_embedding_error();
  return table;
}

// A group of `size` ranks with one table each.
struct Ranks {
  explicit Ranks(int size, const Spec& spec = {}) : Ranks(size, [&](int) { return spec; }) {}
  Ranks(int size, const std::function<Spec(int)>& spec) : hub(size) {
    for (int rank = 0; rank < size; ++rank) {
      groups.push_back(std::make_unique<Group>(rank, size, size > 1 ? hub.of(rank) : nullptr));
      tables.push_back(make_table(groups.back().get(), spec(rank)));
    }
  }
  Hub hub;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<Table*> tables;

  Call* lookup(int rank, const std::vector<int64_t>& keys, uint32_t flags) {
    lightcc_embedding_wanted w{};
    w.size = sizeof w, w.table = tables[size_t(rank)], w.keys = keys.data(), w.count = int64_t(keys.size());
    Call* call = nullptr;
    EXPECT_EQ(lightcc_embedding_lookup(groups[size_t(rank)].get(), &w, 1, flags, &call), 0)
        << lightcc_embedding_error();
    return call;
  }
  Call* update(int rank, const std::vector<int64_t>& keys, const std::vector<double>& g, uint32_t flags,
               Numbers n = {0.1}) {
    return update(rank, lightcc_embedding_gradient{nullptr, 0, keys.data(), nullptr, int64_t(keys.size()), g.data()},
                  flags, n);
  }
  Call* update(int rank, lightcc_embedding_gradient gradient, uint32_t flags, Numbers n = {0.1}) {
    lightcc_embedding_step s{sizeof s, 1, tables[size_t(rank)], &gradient, n.lr, n.beta1, n.beta2, n.eps, n.l1, n.l2,
                             n.l21};
    Call* call = nullptr;
    EXPECT_EQ(lightcc_embedding_update(groups[size_t(rank)].get(), &s, 1, flags, &call), 0)
        << lightcc_embedding_error();
    return call;
  }
  Call* serve(int rank, uint32_t flags = 0) {
    Call* call = nullptr;
    EXPECT_EQ(lightcc_embedding_serve(groups[size_t(rank)].get(), flags, &call), 0);
    return call;
  }
};

// The status of each call when all are done; ranks take turns.
inline std::vector<int> finish(const std::vector<Call*>& calls) {
  std::vector<int> status(calls.size(), LIGHTCC_PENDING);
  for (int turn = 0; turn < 20; ++turn)
    for (size_t i = 0; i < calls.size(); ++i)
      if (status[i] == LIGHTCC_PENDING) status[i] = lightcc_embedding_finish(calls[i], 0);
  return status;
}

// One a key, in the order of the keys as given.
inline std::vector<double> rows_of(Call* call, int64_t dim) {
  lightcc_embedding_found found{};
  EXPECT_EQ(lightcc_embedding_get_found(call, 0, &found), 0);
  const double* rows = static_cast<const double*>(found.rows);
  std::vector<double> all;
  for (int64_t i = 0; i < found.count; ++i)
    all.insert(all.end(), rows + found.inverse[i] * dim, rows + (found.inverse[i] + 1) * dim);
  return all;
}
inline std::vector<int64_t> keys_of(Call* call) {
  lightcc_embedding_found found{};
  EXPECT_EQ(lightcc_embedding_get_found(call, 0, &found), 0);
  return {found.keys, found.keys + found.unique};
}

inline void release(const std::vector<Call*>& calls) {
  for (Call* call : calls) lightcc_embedding_release(call);
}

inline std::vector<double> read(Table* table, const std::vector<int64_t>& keys) {
  std::vector<double> rows(keys.size() * size_t(table->shard->layout().dim));
  EXPECT_EQ(lightcc_embedding_read(table, keys.data(), nullptr, int64_t(keys.size()), rows.data()), 0);
  return rows;
}

}  // namespace lightcc::embedding::test
