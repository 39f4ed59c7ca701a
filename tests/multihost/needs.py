"""What a test needs of the machine. Where that is missing, the test is skipped for a reason that begins with MISSING
and says what to do; tests/conftest.py counts the tests skipped for each of them."""
import shutil

MISSING = "missing: "
_PACKAGES = {"bridge": "iproute2", "ip": "iproute2", "tc": "iproute2", "nft": "nftables", "hostname": "hostname",
             "unshare": "util-linux", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
             "sshd": "openssh-server", "java": "openjdk-17-jre-headless"}  # of Debian and Ubuntu


def why_not(*programs: str) -> str:
    """"" if all these programs are installed, else the reason of a skip."""
    for program in programs:
        if not shutil.which(program) and not shutil.which(program, path="/usr/local/sbin:/usr/sbin:/sbin"):
            return f"{MISSING}{program} (Debian, Ubuntu: apt-get install {_PACKAGES[program]})"
    return ""
