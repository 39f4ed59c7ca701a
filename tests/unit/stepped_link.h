// A link of a cluster of transports in one process, whose every use lets all of them do what they can.
#pragma once
#include <memory>
#include <mutex>

#include "net/link.h"

namespace lightcc {

template <class Cluster> class SteppedLink : public Link, public BulkLink {
  template <class Body> auto turn(Body body) {
    std::lock_guard lock(mutex_);
    cluster_.step();
    auto result = body();
    cluster_.step();
    return result;
  }

 public:
  SteppedLink(Cluster& cluster, std::mutex& mutex, std::unique_ptr<Link> link)
      : cluster_(cluster), mutex_(mutex), link_(std::move(link)) {}
  std::byte* reserve(size_t n) override { return turn([&] { return link_->reserve(n); }); }
  void commit(size_t n) override { turn([&] { return link_->commit(n), true; }); }
  const std::byte* peek(size_t n) override { return turn([&] { return link_->peek(n); }); }
  void consume(size_t n) override { turn([&] { return link_->consume(n), true; }); }
  size_t record_bytes() const override { return link_->record_bytes(); }
  BulkLink* bulk() override { return link_->bulk() ? this : nullptr; }
  bool send_from(const std::byte* data, size_t n) override {
    return turn([&] { return link_->bulk()->send_from(data, n); });
  }
  void post(std::byte* to, size_t n) override {
    turn([&] { return link_->bulk()->post(to, n), true; });
  }
  uint64_t lent() const override { return link_->bulk()->lent(); }
  size_t release_lent(uint64_t before) override {
    return turn([&] { return link_->bulk()->release_lent(before); });
  }
  size_t release() override { return turn([&] { return link_->bulk()->release(); }); }

 private:
  Cluster& cluster_;
  std::mutex& mutex_;
  std::unique_ptr<Link> link_;
};

}  // namespace lightcc
