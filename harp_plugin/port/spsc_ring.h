// A queue from one thread to one other, without locks: a ring of 2^n slots and two indices that only grow.
//
// The two ends are objects of their own, so that a ring can lie in memory that two processes share: each end keeps its
// own index, the capacity and the other side's last index in private memory, and publishes its index for the other.
// Invariants:
//   1. Only the producer writes `tail`, only the consumer writes `head`; head <= tail <= head + capacity.
//   2. A slot belongs to the producer until tail has passed it, then to the consumer until head has passed it.
//   3. What the other side publishes is checked against 1 before it is used, and a slot's number comes from the private
//      index alone: a peer that writes nonsense makes the ring `broken()` (it then moves nothing), and that is all.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

namespace harp {

inline constexpr size_t kCacheLine = 64;

// The shared part besides the slots. Zeroed memory is a valid, empty ring.
struct RingIndices {
  alignas(kCacheLine) std::atomic<uint64_t> tail{0};
  alignas(kCacheLine) std::atomic<uint64_t> head{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RingIndices) == 2 * kCacheLine);

// The end that pushes. One thread calls.
template <class Slot>
class RingProducer {
  static_assert(std::is_trivially_copyable_v<Slot>);

 public:
  // `capacity` is a power of two. The indices may already have been used by this end's process only.
  RingProducer(RingIndices* shared, Slot* slots, size_t capacity)
      : shared_(shared), slots_(slots), mask_(capacity - 1), tail_(shared->tail.load(std::memory_order_relaxed)),
        head_seen_(shared->head.load(std::memory_order_acquire)) {
    if (tail_ - head_seen_ > capacity) broken_ = true;
  }

  // Free slots; looks at the consumer's index only if it knows of fewer than `wanted`.
  size_t room(size_t wanted = 1) {
    const size_t capacity = mask_ + 1;
    if (capacity - (tail_ - head_seen_) < wanted || broken_) look();
    return broken_ ? 0 : capacity - (tail_ - head_seen_);
  }
  // The i-th free slot, i < room(). Nobody else sees it before publish().
  Slot& slot(size_t i) { return slots_[(tail_ + i) & mask_]; }
  void publish(size_t count) {
    tail_ += count;
    shared_->tail.store(tail_, std::memory_order_release);
  }
  size_t push(std::span<const Slot> items) {
    const size_t count = std::min(items.size(), room(items.size()));
    for (size_t i = 0; i < count; ++i) slot(i) = items[i];
    if (count) publish(count);
    return count;
  }
  bool push(const Slot& item) { return push(std::span(&item, 1)) == 1; }

  // How many the consumer has taken, as last published.
  uint64_t taken() {
    look();
    return head_seen_;
  }
  bool broken() const { return broken_; }

 private:
  void look() {
    const uint64_t head = shared_->head.load(std::memory_order_acquire);
    // Both differences at once: the consumer cannot go back, nor pass what has been pushed.
    if (head - head_seen_ > tail_ - head_seen_) {
      broken_ = true;
      return;
    }
    head_seen_ = head;
  }

  RingIndices* shared_;
  Slot* slots_;
  size_t mask_;
  uint64_t tail_;
  uint64_t head_seen_;
  bool broken_ = false;
};

// The end that pops. One thread calls.
template <class Slot>
class RingConsumer {
  static_assert(std::is_trivially_copyable_v<Slot>);

 public:
  RingConsumer(RingIndices* shared, const Slot* slots, size_t capacity)
      : shared_(shared), slots_(slots), mask_(capacity - 1), head_(shared->head.load(std::memory_order_relaxed)),
        tail_seen_(head_) {}

  // Filled slots; looks at the producer's index only if it knows of fewer than `wanted`.
  size_t available(size_t wanted = 1) {
    if (tail_seen_ - head_ < wanted) look();
    return broken_ ? 0 : tail_seen_ - head_;
  }
  // A copy of the i-th filled slot, i < available(). Where another process can write to the slot, decide by the copy.
  Slot read(size_t i) const {
    Slot copy = slots_[(head_ + i) & mask_];
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler may not read the slot a second time later
    return copy;
  }
  // The slot itself: for parts that read() need not copy. It stays until retire() has passed it.
  const Slot& slot(size_t i) const { return slots_[(head_ + i) & mask_]; }
  void retire(size_t count) {
    head_ += count;
    shared_->head.store(head_, std::memory_order_release);
  }
  size_t pop(std::span<Slot> to) {
    const size_t count = std::min(to.size(), available(to.size()));
    for (size_t i = 0; i < count; ++i) to[i] = read(i);
    if (count) retire(count);
    return count;
  }
  bool pop(Slot& to) { return pop(std::span(&to, 1)) == 1; }

  bool broken() const { return broken_; }

 private:
  void look() {
    const uint64_t tail = shared_->tail.load(std::memory_order_acquire);
    if (tail - head_ > mask_ + 1 || tail - head_ < tail_seen_ - head_) {
      broken_ = true;
      return;
    }
    tail_seen_ = tail;
  }

  RingIndices* shared_;
  const Slot* slots_;
  size_t mask_;
  uint64_t head_;
  uint64_t tail_seen_;
  bool broken_ = false;
};

// Both ends and the memory, between two threads of one process.
template <class Slot>
class SpscRing {
 public:
  explicit SpscRing(size_t least_capacity)
      : capacity_(std::bit_ceil(std::max<size_t>(least_capacity, 1))),
        slots_(std::make_unique<Slot[]>(capacity_)),
        producer_(&shared_, slots_.get(), capacity_),
        consumer_(&shared_, slots_.get(), capacity_) {}
  SpscRing(const SpscRing&) = delete;
  SpscRing& operator=(const SpscRing&) = delete;

  size_t capacity() const { return capacity_; }
  RingProducer<Slot>& producer() { return producer_; }  // the producing thread only
  RingConsumer<Slot>& consumer() { return consumer_; }  // the consuming thread only

 private:
  const size_t capacity_;
  std::unique_ptr<Slot[]> slots_;
  RingIndices shared_;
  alignas(kCacheLine) RingProducer<Slot> producer_;
  alignas(kCacheLine) RingConsumer<Slot> consumer_;
};

}  // namespace harp
