"""Checks that one word has one meaning (docs/vocabulary.md): a C++ type's name is used once, and what the page says of
the code is there.

A type in a namespace shares its name with no other type, not even with one inside a class. Types inside two classes may
share one (`Aggregator::Entry`, `Coordinator::Entry`), since their users name the class. Prints one line per offence and
exits 1 if there is any. With an argument, checks the tree at that path.
"""
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, Set

PAGE = "docs/vocabulary.md"
# Names that had several meanings before this was checked, and the scopes that they are in. Take away, do not add.
ALLOWED = {
    "Address": {"harp", "lightcc"},
    "Arrival": {"harp", "lightcc::(unnamed)::Simulation in simulate.cc"},
    "Batch": {"harp::UdpReceiver", "lightcc"},
    "Bfloat16": {"lightcc::kernels::Avx2", "lightcc::kernels::Avx512", "lightcc::scaling"},
    "Boolean": {"lightcc::kernels", "lightcc::scaling"},
    "Callbacks": {"lightcc", "lightcc::HeartbeatSocket"},
    "Channel": {"harp", "harp::bench"},
    "Client": {"harp::Daemon", "lightcc::(unnamed) in pmix.cc", "lightcc::ExchangeRoot",
               "lightcc::LocalExchangeRoot"},
    "Code": {"lightcc", "lightcc::tf"},
    "Completion": {"harp", "lightcc::tf"},
    "Config": {"harp", "lightcc"},
    "Context": {"harp", "lightcc"},
    "Counters": {"harp", "harp::RingPort", "lightcc"},
    "Doorbell": {"harp", "lightcc"},
    "End": {"harp::plugtest", "lightcc::LoopNetwork"},
    "Endpoint": {"harp", "harp::plugtest", "lightcc"},
    "Engine": {"harp", "lightcc"},
    "Expected": {"harp", "harp::Communicator"},
    "Failure": {"harp::plugtest::(unnamed) in peer.cc", "lightcc"},
    "Float16": {"lightcc::kernels::Avx2", "lightcc::kernels::Avx512", "lightcc::scaling"},
    "Flow": {"harp::plugtest::(unnamed) in peer.cc", "lightcc", "lightcc::NodeLinks"},
    "Frame": {"harp::Xsk", "lightcc", "lightcc::HarpStream"},
    "Group": {"harp", "lightcc"},
    "Handle": {"harp", "harp::bench::(unnamed) in plugin_channel.cc"},
    "HarpTransport": {"harp::bench::(unnamed) in harp_channel.cc", "lightcc"},
    "Header": {"harp", "lightcc"},
    "Inbox": {"harp::(unnamed) in mem.cc", "lightcc"},
    "Incoming": {"harp", "lightcc::HarpTransport"},
    "Interface": {"harp", "lightcc"},
    "Key": {"harp", "lightcc::HarpTransport", "lightcc::PluginTransport", "lightcc::TcpTransport"},
    "Kind": {"harp::(unnamed) in ports.cc", "harp::ShmMessage", "lightcc",
             "lightcc::(unnamed)::Notice in plugin_transport.cc", "lightcc::FrameHeader", "lightcc::Step"},
    "Knob": {"harp::(unnamed) in config.cc", "lightcc::(unnamed) in config.cc"},
    "Launch": {"lightcc::(unnamed) in launchers.cc", "lightcc::NcclBackend"},
    "Layout": {"harp::(unnamed) in handle.cc", "lightcc::LocalRanks"},
    "LinkState": {"lightcc", "lightcc::HarpTransport", "lightcc::PluginTransport"},
    "Memory": {"harp", "lightcc"},
    "Message": {"harp::Incoming", "harp::Outgoing", "lightcc", "lightcc::CompressedAllreduce"},
    "Mode": {"harp", "harp::UdpReceiver", "lightcc::BlockReduce"},
    "Name": {"harp::(unnamed) in shm_socket.cc", "lightcc::Counters"},
    "Number": {"lightcc::kernels", "lightcc::tf::(unnamed) in numbers.cc"},
    "Pair": {"harp::plugtest", "lightcc::(unnamed) in loop.cc"},
    "Part": {"harp::NetRequest", "lightcc::(unnamed) in shared.cc"},
    "Parts": {"harp::UdpReceiver", "lightcc::(unnamed) in nccl.cc"},
    "Path": {"harp", "lightcc::Resources"},
    "Peer": {"harp::(unnamed) in xdp.cc", "lightcc::FailureDetector"},
    "Phase": {"harp::bench", "lightcc", "lightcc::(unnamed)::TopKEncoder in piece_codec.cc", "lightcc::EpochState",
              "lightcc::Int8Encoding", "lightcc::NcclHierarchicalBackend", "lightcc::TopKSelection"},
    "Pieces": {"lightcc::(unnamed) in by_host.cc", "lightcc::packing"},
    "Place": {"lightcc", "lightcc::CollectiveLayout"},
    "PluginTransport": {"harp::bench::(unnamed) in plugin_channel.cc", "lightcc"},
    "Range": {"harp", "lightcc", "lightcc::Residual", "lightcc::TcpStream"},
    "Received": {"lightcc", "lightcc::HandshakeConnection"},
    "Record": {"harp", "lightcc::(unnamed) in loop.cc"},
    "Rendezvous": {"harp", "lightcc"},
    "Request": {"harp", "harp::bench::(unnamed) in tcp_channel.cc", "lightcc"},
    "Result": {"harp::bench::(unnamed)::Board in pairs.cc", "lightcc::tf", "nccl"},
    "Row": {"lightcc", "lightcc::Timeline"},
    "Sent": {"harp", "harp::bench::(unnamed)::Sender in traffic.cc", "lightcc", "lightcc::HandshakeConnection"},
    "Settings": {"harp::Engine", "harp::bench", "harp::plugtest"},
    "State": {"harp", "harp::(unnamed) in devices.cc", "harp::Request", "lightcc::Aggregator", "lightcc::FastPath",
              "lightcc::Handshake"},
    "Sum": {"lightcc", "lightcc::kernels"},
    "Tag": {"lightcc::(unnamed) in handshake.cc", "lightcc::(unnamed) in message.cc"},
    "Task": {"lightcc::(unnamed) in pmix.cc", "lightcc::kernels"},
    "TcpTransport": {"harp::bench::(unnamed) in tcp_channel.cc", "lightcc"},
    "Transport": {"harp::bench", "lightcc"},
    "Value": {"harp::(unnamed) in config.cc", "lightcc::(unnamed) in config.cc",
              "lightcc::(unnamed)::pmix in pmix.cc"},
}
TOKEN = re.compile(r"""
    (?P<open>\{) | (?P<close>\})
  | \bnamespace\s+(?P<namespace>[\w:]*)\s*(?=\{)
  | \b(?:class|struct|union|enum(?:\s+class|\s+struct)?)\s+(?:alignas\([^)]*\)\s*)?
    (?P<type>[A-Za-z_][\w:]*)(?:\s+final)?\s*(?::[^;{()]*)?(?=\{)
""", re.VERBOSE)
NOT_CODE = re.compile(r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])'""", re.VERBOSE | re.DOTALL)


def types(text: str) -> Iterator[tuple]:
    """(name, scope, whether that is a namespace) of each type that is defined."""
    scopes: List[tuple] = []  # name, is it a namespace
    coming = ("", False)
    for token in TOKEN.finditer(NOT_CODE.sub(" ", text)):
        if token["open"]:
            scopes.append(coming)
            coming = ("", False)
        elif token["close"]:
            scopes[-1:] = []
        elif token["namespace"] is not None:
            coming = (token["namespace"] or "(unnamed)", True)
        else:
            *owner, name = token["type"].split("::")
            scope = [each for each, _ in scopes if each] + owner
            yield name, "::".join(scope), not owner and all(is_namespace for _, is_namespace in scopes)
            coming = (name, False)


def repeated(root: Path) -> Dict[str, Set[str]]:
    """Names of several types, of which one at least is in a namespace; and their scopes."""
    found: Dict[str, Set[str]] = defaultdict(set)
    outer = set()
    for folder in ("csrc", "harp_plugin"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu"):
                for name, scope, in_namespace in types(path.read_text()):
                    # What is unnamed is each file's own.
                    found[name].add(f"{scope} in {path.name}" if "(unnamed)" in scope else scope)
                    outer.update([name] if in_namespace else [])
    return {name: scopes for name, scopes in found.items() if len(scopes) > 1 and name in outer}


def type_offences(root: Path) -> Iterator[str]:
    now = repeated(root)
    for name, scopes in sorted(now.items()):
        if new := scopes - ALLOWED.get(name, set()):
            others = ", ".join(sorted(scopes - new)) or "each other"
            yield f"type {name} of {', '.join(sorted(new))}: the name is taken by {others}; find a name that says more"
    for name, scopes in sorted(ALLOWED.items()):
        if gone := scopes - now.get(name, set()):
            where = ", ".join(sorted(gone))
            yield f"type {name} of {where} is repeated no more: take it off ALLOWED in vocabulary.py"


def page_offences(root: Path) -> Iterator[str]:
    """Of the rows of the page: their words are there once, their files exist and have their types."""
    python = defaultdict(list)
    for path in (root / "lightcc").rglob("*.py"):
        python[path.name].append(path)
    seen: Set[str] = set()
    for line in (root / PAGE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3 or cells[0] in ("word", "---"):
            continue
        for word in cells[0].split(", "):
            if word in seen:
                yield f"{PAGE}: {word} is explained twice"
            seen.add(word)
        text, names = "", []
        for token in re.findall(r"`([^`]+)`", cells[2]):
            if not token.endswith((".h", ".py")):
                names.append(token)
                continue
            paths = [path for path in (root / "csrc" / token, root / token, *python[token]) if path.is_file()]
            text += "".join(path.read_text() for path in paths)
            if not paths:
                yield f"{PAGE}: {cells[0]}: there is no {token}"
        yield from (f"{PAGE}: {cells[0]}: {name} is not in the file" for name in names
                    if not re.search(rf"\b{name}\b", text))


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    offences = [*type_offences(root), *page_offences(root)]
    for offence in offences:
        print(f"vocabulary: {offence}", file=sys.stderr)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
