#include "harp_plugin/port/xdp_filter.h"

#include <arpa/inet.h>
#include <linux/bpf.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/syscall.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "harp_plugin/port/xdp_frame.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr uint32_t kMostAdmitted = 4096;

// Not in the headers of older systems.
constexpr int kLinkCreate = 28, kLinkDetach = 34, kAttachToInterface = 37;
constexpr uint32_t kHasFragments = 1u << 5, kInDriver = 1u << 2;

// The beginning of the kernel's bpf_attr for each command; what a kernel knows beyond it counts as 0.
struct MapCreate {
  uint32_t type, key_bytes, value_bytes, most_entries, flags;
};
struct MapElement {
  uint32_t map, unused;
  uint64_t key, value, flags;
};
struct ProgramLoad {
  uint32_t type, instructions;
  uint64_t code, license;
  uint32_t log_level, log_bytes;
  uint64_t log;
  uint32_t kernel_version, flags;
};
struct LinkDetach {
  uint32_t link;
};
struct LinkCreate {
  uint32_t program, interface, attach_type, flags;
};

template <class Attributes>
int bpf(int command, const Attributes& attributes) {
  return static_cast<int>(syscall(SYS_bpf, command, &attributes, sizeof attributes));
}

uint64_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

Fd make_map(bpf_map_type type, size_t key_bytes, size_t value_bytes, uint32_t most_entries) {
  Fd map(bpf(BPF_MAP_CREATE, MapCreate{type, static_cast<uint32_t>(key_bytes), static_cast<uint32_t>(value_bytes),
                                       most_entries, 0}));
  if (!map)
    throw lightcc::system_error("HARP: making a BPF map (port xdp needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF)");
  return map;
}

MapElement element(const Fd& map, const void* key, const void* value, uint64_t flags = BPF_ANY) {
  return {static_cast<uint32_t>(map.get()), 0, address_of(key), address_of(value), flags};
}

bool put(const Fd& map, const void* key, const void* value) {
  return bpf(BPF_MAP_UPDATE_ELEM, element(map, key, value)) == 0;
}

struct Admitted {  // a key; its value is a slot of the sockets
  uint32_t address;
  uint32_t port;  // the upper half is 0
  uint32_t queue;
};

// Registers as the kernel has them: r0 a call's result, r1 to r5 its arguments, r6 is kept, r10 the stack.
class Assembler {
 public:
  void copy(int to, int from) { emit(BPF_ALU64 | BPF_MOV | BPF_X, to, from, 0, 0); }
  void set(int to, int value) { emit(BPF_ALU64 | BPF_MOV | BPF_K, to, 0, 0, value); }
  void add(int to, int value) { emit(BPF_ALU64 | BPF_ADD | BPF_K, to, 0, 0, value); }
  void mask(int to, int value) { emit(BPF_ALU64 | BPF_AND | BPF_K, to, 0, 0, value); }
  void load(int bytes, int to, int from, int offset) { emit(BPF_LDX | BPF_MEM | size(bytes), to, from, offset, 0); }
  void store(int bytes, int to, int offset, int from) { emit(BPF_STX | BPF_MEM | size(bytes), to, from, offset, 0); }
  void map(int to, const Fd& map) {
    emit(BPF_LD | BPF_DW | BPF_IMM, to, BPF_PSEUDO_MAP_FD, 0, map.get());
    emit(0, 0, 0, 0, 0);  // the upper half
  }
  void call(bpf_func_id function) { emit(BPF_JMP | BPF_CALL, 0, 0, 0, function); }
  void exit() { emit(BPF_JMP | BPF_EXIT, 0, 0, 0, 0); }
  // Jumps to where leave() is.
  void leave_if_greater(int left, int right) { jump(BPF_JGT | BPF_X, left, right, 0); }
  void leave_if_equal(int left, int value) { jump(BPF_JEQ | BPF_K, left, 0, value); }
  void leave_unless_equal(int left, int value) { jump(BPF_JNE | BPF_K, left, 0, value); }
  void leave() {
    for (size_t at : jumps_) code_[at].off = static_cast<int16_t>(code_.size() - at - 1);
  }
  const std::vector<bpf_insn>& code() const { return code_; }

 private:
  static int size(int bytes) { return bytes == 1 ? BPF_B : bytes == 2 ? BPF_H : BPF_W; }
  void jump(int condition, int left, int right, int value) {
    jumps_.push_back(code_.size());
    emit(BPF_JMP | condition, left, right, 0, value);
  }
  void emit(int code, int to, int from, int offset, int value) {
    bpf_insn instruction{};
    instruction.code = static_cast<uint8_t>(code);
    instruction.dst_reg = to & 15;
    instruction.src_reg = from & 15;
    instruction.off = static_cast<int16_t>(offset);
    instruction.imm = value;
    code_.push_back(instruction);
  }
  std::vector<bpf_insn> code_;
  std::vector<size_t> jumps_;
};

// Ethernet, IPv4 without options, not a fragment, UDP; then destination and queue are looked up.
std::vector<bpf_insn> assemble(const Fd& admitted, const Fd& sockets) {
  constexpr int kContext = 6, kData = 2, kEnd = 3, kField = 4, kStack = 10, kKey = -int(sizeof(Admitted));
  Assembler a;
  a.copy(kContext, 1);
  a.load(4, kData, kContext, offsetof(xdp_md, data));
  a.load(4, kEnd, kContext, offsetof(xdp_md, data_end));
  a.copy(kField, kData);
  a.add(kField, kFrameHeaders);
  a.leave_if_greater(kField, kEnd);
  a.load(2, kField, kData, kAtEthernetType);
  a.leave_unless_equal(kField, htons(kEthernetIp));
  a.load(1, kField, kData, kAtIpVersion);
  a.leave_unless_equal(kField, kIpWithoutOptions);
  a.load(2, kField, kData, kAtIpFragment);
  a.mask(kField, htons(kIsFragment));
  a.leave_unless_equal(kField, 0);
  a.load(1, kField, kData, kAtIpProtocol);
  a.leave_unless_equal(kField, IPPROTO_UDP);
  a.load(4, kField, kData, kAtIpTo);
  a.store(4, kStack, kKey + int(offsetof(Admitted, address)), kField);
  a.load(2, kField, kData, kAtUdpTo);
  a.store(4, kStack, kKey + int(offsetof(Admitted, port)), kField);
  a.load(4, kField, kContext, offsetof(xdp_md, rx_queue_index));
  a.store(4, kStack, kKey + int(offsetof(Admitted, queue)), kField);
  a.map(1, admitted);
  a.copy(2, kStack);
  a.add(2, kKey);
  a.call(BPF_FUNC_map_lookup_elem);
  a.leave_if_equal(0, 0);
  a.load(4, 2, 0, 0);
  a.map(1, sockets);
  a.set(3, XDP_PASS);  // where the socket is closed
  a.call(BPF_FUNC_redirect_map);
  a.exit();
  a.leave();
  a.set(0, XDP_PASS);
  a.exit();
  return a.code();
}

Fd load(const std::vector<bpf_insn>& code) {
  std::vector<char> log(1 << 14);
  ProgramLoad load{.type = BPF_PROG_TYPE_XDP,
                   .instructions = static_cast<uint32_t>(code.size()),
                   .code = address_of(code.data()),
                   .license = address_of("GPL"),
                   .log_level = 1,
                   .log_bytes = static_cast<uint32_t>(log.size()),
                   .log = address_of(log.data()),
                   .kernel_version = 0,
                   .flags = kHasFragments};
  Fd program(bpf(BPF_PROG_LOAD, load));
  if (!program) {  // before Linux 5.18 packets are whole
    load.flags = 0;
    program = Fd(bpf(BPF_PROG_LOAD, load));
  }
  if (!program)
    throw Error(Code::internal,
                lightcc::system_error("HARP: loading an XDP program").what() + std::string("\n") + log.data());
  return program;
}

}  // namespace

XdpFilter::XdpFilter(const std::string& interface)
    : admitted_(make_map(BPF_MAP_TYPE_HASH, sizeof(Admitted), sizeof(uint32_t), kMostAdmitted)),
      sockets_(make_map(BPF_MAP_TYPE_XSKMAP, sizeof(uint32_t), sizeof(int), kMostAdmitted)),
      program_(load(assemble(admitted_, sockets_))) {
  link_ = Fd(bpf(kLinkCreate, LinkCreate{static_cast<uint32_t>(program_.get()), if_nametoindex(interface.c_str()),
                                         kAttachToInterface, kInDriver}));
  if (!link_) {
    const bool taken = errno == EBUSY || errno == EEXIST;
    throw lightcc::system_error("HARP: attaching an XDP program to " + interface +
                                (taken ? ", which has one already: another process's (harpd shares its queues out), or "
                                         "of other software"
                                       : ""));
  }
  for (const Fd* one : {&admitted_, &sockets_, &program_, &link_}) not_inherited_.emplace_back(one->get());
  for (uint32_t slot = kMostAdmitted; slot > 0; --slot) free_.push_back(slot - 1);
}

// Even if somebody else has the link's descriptor.
XdpFilter::~XdpFilter() { bpf(kLinkDetach, LinkDetach{static_cast<uint32_t>(link_.get())}); }

void XdpFilter::admit(uint32_t address, uint16_t port, uint32_t queue, int socket) {
  if (free_.empty()) throw Error(Code::internal, "HARP: too many UDP ports for one XDP program");
  const Admitted key{address, port, queue};
  const uint32_t slot = free_.back();
  if (!put(sockets_, &slot, &socket) || bpf(BPF_MAP_UPDATE_ELEM, element(admitted_, &key, &slot, BPF_NOEXIST)) != 0)
    throw lightcc::system_error("HARP: admitting a UDP port to an AF_XDP socket");
  free_.pop_back();
}

void XdpFilter::forget(uint32_t address, uint16_t port, uint32_t queue) {
  const Admitted key{address, port, queue};
  uint32_t slot;
  if (bpf(BPF_MAP_LOOKUP_ELEM, element(admitted_, &key, &slot)) != 0) return;
  bpf(BPF_MAP_DELETE_ELEM, element(admitted_, &key, nullptr));
  bpf(BPF_MAP_DELETE_ELEM, element(sockets_, &slot, nullptr));
  free_.push_back(slot);
}

}  // namespace harp
