// What this process has done since init, for tests, benchmarks and the curious.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

namespace lightcc {

struct Counters {
  enum Name { requests, fast_path, batches, fused_batches, collectives, fused_requests, announced, cached, planned,
              payload_bytes, copied_bytes, staged_bytes, compressed_bytes, saved_bytes, stall_warnings, wait_ns,
              most_in_flight, caller_steps, background_steps, harp_bytes, net_plugin_bytes, tcp_bytes,
              retransmits, reconnects, steps, exposed_ns, kCount };
  static constexpr std::array<const char*, kCount> kNames = {
      "requests",           // calls of a framework that have finished
      "fast_path",          // of these, on the fast path, without negotiation
      "batches",            // what ran as one, on this rank
      "fused_batches",      // of these, with more than one tensor
      "collectives",        // run by a backend
      "fused_requests",     // requests that ran together with others
      "announced",          // requests announced in full
      "cached",             // requests announced as a number
      "planned",            // requests that came to a fusion plan, and were announced with their bucket
      "payload_bytes",      // bytes that collectives worked on
      "copied_bytes",       // payload bytes copied into and out of buckets, and otherwise within a rank's memory
      "staged_bytes",       // payload bytes copied into or out of the memory of links
      "compressed_bytes",   // of the tensors whose all-reduce was compressed between hosts
      "saved_bytes",        // that this rank had to send to other hosts less than without compression
      "stall_warnings",
      "wait_ns",            // time that callers spent in wait
      "most_in_flight",     // requests that were on their way together, at most
      "caller_steps",       // of the engine in which something moved, made by threads of the framework
      "background_steps",   // the same, made by the engine thread
      "harp_bytes",         // that this rank has committed to links over HARP
      "net_plugin_bytes",   // the same, over a network plugin of NCCL's
      "tcp_bytes",          // the same, over TCP, with what frames them
      "retransmits",        // packets that this rank has sent again, as TCP or HARP counts them
      "reconnects",         // connections of TCP that were replaced
      "steps",              // of training that have begun (step_clock.h)
      "exposed_ns"};        // time from the last submission to the last result (docs/metrics.md)
  void add(Name name, uint64_t n = 1) { values[name].fetch_add(n, std::memory_order_relaxed); }
  // One more, of a counter that only the holder of the progress lock changes: no locked instruction.
  void count(Name name) {
    values[name].store(values[name].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void raise(Name name, uint64_t to) {
    uint64_t is = values[name].load(std::memory_order_relaxed);
    while (is < to && !values[name].compare_exchange_weak(is, to, std::memory_order_relaxed)) {}
  }
  std::array<std::atomic<uint64_t>, kCount> values{};
};

}  // namespace lightcc
