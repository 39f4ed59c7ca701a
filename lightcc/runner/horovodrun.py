"""The command horovodrun, where `python -m lightcc.as_horovod --install` has put it: lightccrun --as-horovod."""

import sys
from collections.abc import Sequence
from typing import Optional

from lightcc import as_horovod
from lightcc.runner import launch


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments in (["-v"], ["--version"]):  # scripts compare it with the versions that Horovod has had
        print(as_horovod.version())
        return 0
    return launch.main(["--as-horovod", *arguments])


if __name__ == "__main__":
    sys.exit(main())
