"""python -m lightcc is lightccrun."""

import sys

from lightcc.runner.launch import main

sys.exit(main())
