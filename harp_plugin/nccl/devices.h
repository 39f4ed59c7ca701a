// NCCL's devices: the network interfaces that HARP may use, each with a HARP context that is opened when it is first
// used. They belong to the process; in a forked child they begin anew.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "harp_plugin/api/config.h"
#include "harp_plugin/port/interfaces.h"

namespace harp {

// A context that closes when the last of its users lets it go: an initialized device, a communicator, a listener.
using SharedContext = std::shared_ptr<harp_context>;

struct Device {
  Interface interface;
  std::string pci_path;  // "": not on a PCI bus
  uint64_t guid = 0;     // its MAC address; without one its index
  SharedContext context = nullptr;
};

// Any thread calls these. They throw lightcc::Error that names the setting to change.
class Devices {
 public:
  static void initialize();  // a user more; the first reads the environment and the interfaces
  static void finalize();    // the last user closes the contexts that nobody uses
  static int count();
  static Device get(int index);  // without a context if it was not opened
  static SharedContext open(int index);
  static Config config();
};

}  // namespace harp
