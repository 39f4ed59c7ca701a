// What a cluster can carry, as numbers: for the cost model (cost.h), which needs no cluster to be there. Seconds and
// bytes. The defaults are those of hosts with one 25 Gbit/s NIC.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lightcc {

struct Cluster {
  std::vector<int> hosts;              // ranks of each; ranks are numbered host by host
  double local_latency_s = 1e-6;       // of a message inside a host
  double memory_bytes_per_s = 20e9;    // of a host, read or written, by all of its ranks together
  double latency_s = 30e-6;            // of a message between hosts
  double message_s = 1e-6;             // of a rank's core, for each message that it sends
  int nics = 1;                        // of a host
  double nic_bytes_per_s = 3.1e9;      // of each, in each direction
  bool duplex = true;                  // false: both directions share that
  double flow_bytes_per_s = 0;         // most of one connection, as some clouds have it; 0: no such limit
  int pod_hosts = 0;                   // hosts below one switch; 0: all are
  double oversubscription = 1;         // NIC bytes of a pod's hosts for each byte of its uplink

  // Throws Error{invalid_argument} that names the field.
  void check() const;
  int ranks() const;
  int most_ranks_of_host() const;
  // The same hosts, with one rank each.
  Cluster by_host() const;
};

// What transfers between the hosts of a cluster share: memories, NICs and uplinks.
class Resources {
 public:
  explicit Resources(const Cluster&);

  struct Use { int resource; double weight; };  // bytes of the resource for each byte of the transfer
  struct Path {
    Use uses[6];
    int count = 0;
    double latency_s;
    double most_bytes_per_s;           // of one transfer, whatever else there is
    void add(int resource, double weight) { uses[count++] = {resource, weight}; }
  };
  Path path(int from_rank, int to_rank, bool added = false) const;  // added: to what the receiver has

  const std::vector<double>& bytes_per_s() const { return bytes_per_s_; }  // by resource
  const char* name(int resource) const;  // "memory", "NIC out", ...
  int host_of(int rank) const { return host_of_[size_t(rank)]; }

 private:
  int pod_of(int host) const { return cluster_.pod_hosts > 0 ? host / cluster_.pod_hosts : 0; }
  const Cluster& cluster_;
  std::vector<int> host_of_;
  std::vector<double> bytes_per_s_;
};

}  // namespace lightcc
