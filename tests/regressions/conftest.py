"""Each file here is named after the fault it guards against. Their ranks are started as in tests/python."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))
