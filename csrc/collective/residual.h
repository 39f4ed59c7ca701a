// Error feedback: what a rank has left behind of a tensor in compressed exchanges, to be added to the next gradient
// (Seide et al. 2014; Stich et al. 2018). A rank keeps it for the pieces of the tensor that it owns: its lanes.
//
// 1. Whoever changes or copies pieces holds the residual (try_hold): the engine while it compresses the tensor, or a
//    caller who reads or writes a checkpoint. Both hold it only while they go on with it.
// 2. What was written from a checkpoint waits as parts until the tensor is next exchanged, when it is known who owns
//    what. A part of node j belongs to node j modulo the number of nodes; several add up. So the sum over all nodes
//    stays what it was, on whatever hosts the job goes on.
// 3. A tensor of another number of elements is another tensor: nothing is left behind of it.
// 4. The values of a piece are in host memory or in a device's, never in both. An exchange on a device leaves them
//    there; whoever needs them elsewhere, or cut otherwise, brings them back first.
#pragma once
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "device/topk.h"

namespace lightcc {

// What a device has of a piece, on its way into host memory.
class ResidualCopy {
 public:
  virtual ~ResidualCopy() = default;
  virtual bool step() = 0;  // waits for no device; true: there is more to do
  std::vector<float> values, velocity;  // as in ResidualPiece; once there is no more to do
};

// The values of a piece in memory of a device.
class DeviceResidual {
 public:
  virtual ~DeviceResidual() = default;
  virtual int64_t count() const = 0;
  virtual std::unique_ptr<ResidualCopy> copy() const = 0;  // begins it; this outlives the copy
};

// What a device keeps for a piece: two buffers of its values, of which a word says which holds, and with momentum
// correction two of velocities.
inline size_t device_residual_bytes(size_t count, bool velocity) {
  return kLine + (velocity ? 4 : 2) * round_up(count * sizeof(float));
}

struct ResidualPiece {
  int64_t first = 0;
  std::vector<float> values;
  std::vector<float> velocity;  // of momentum correction; empty: none
  TopKWarmStart warm;
  std::shared_ptr<DeviceResidual> device = nullptr;  // where they are, and not in the vectors; nullptr: they are there
  int64_t count() const { return device ? device->count() : int64_t(values.size()); }
};

struct SavedPart {
  bool velocity = false;
  int node = 0;
  int64_t first = 0;
  std::vector<float> values;
};

// What compression has done, all counted on this rank.
struct CompressionTotals {
  uint64_t gradient_bytes = 0;     // of the tensors
  uint64_t elements = 0;           // of the pieces that this rank owns
  uint64_t sent_elements = 0;      // of these
  uint64_t sent_bytes = 0;         // to other nodes
  uint64_t dense_sent_bytes = 0;   // what 2D would have sent to other nodes
  CompressionTotals& operator+=(const CompressionTotals&);
};

enum class CodecRoute {  // what makes messages
  host,
  gpu,   // and the host exchanges them
  nccl,  // a GPU, and NCCL exchanges them
};
const char* name_of(CodecRoute);

class Residual {
 public:
  bool try_hold() { return !held_.exchange(true, std::memory_order_acquire); }
  void let_go() { held_.store(false, std::memory_order_release); }
  // Holds it with all pieces in host memory. false: a caller holds it, or copies from a device are under way, with
  // which this call goes on.
  bool try_hold_at_home();

  // How many exchanges the tensor has seen: all ranks that take part count alike.
  int64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  void set_steps(int64_t steps) { steps_.store(steps, std::memory_order_relaxed); }
  void count_step() { steps_.fetch_add(1, std::memory_order_relaxed); }

  // The holder alone may call the rest.
  struct Range { int64_t first, count; };
  // A bounded piece of bringing all pieces into host memory, waiting for no device; true: there is more to do.
  bool step_home();
  // Whether cut() would change nothing.
  bool is_cut(int64_t elements, const std::vector<Range>&, bool velocity) const;
  // Makes one piece of each range. What is there is kept where it belongs, and saved parts are taken in. Unless all is
  // cut so, the pieces are in host memory.
  void cut(int64_t elements, int node, int nodes, const std::vector<Range>&, bool velocity);
  void add_saved(int64_t elements, SavedPart);
  void note_dense(int64_t elements);  // it was exchanged dense: what is there, and saved parts, wait
  std::vector<ResidualPiece>& pieces() { return pieces_; }
  int64_t elements() const { return elements_; }  // of the whole tensor; 0: it was not exchanged yet
  int node() const { return node_; }
  int nodes() const { return nodes_; }
  bool has_velocity() const { return velocity_; }
  CodecRoute route() const { return route_; }  // of its last message
  void set_route(CodecRoute route) { route_ = route; }
  const CompressionTotals& totals() const { return totals_; }
  void count(const CompressionTotals& exchange);

  // For the thread that runs the exchanges: what has been counted since the last call.
  CompressionTotals take_last() { return std::exchange(last_, {}); }

 private:
  std::atomic<bool> held_{false};
  std::atomic<int64_t> steps_{0};
  int64_t elements_ = 0, saved_elements_ = 0;
  int node_ = 0, nodes_ = 0;
  bool velocity_ = false;
  CodecRoute route_ = CodecRoute::host;
  std::vector<ResidualPiece> pieces_;
  std::unique_ptr<ResidualCopy> coming_;  // of the first piece that is on a device
  std::vector<SavedPart> saved_;
  CompressionTotals totals_, last_;
};

}  // namespace lightcc
