# The version, in its one place: setup and CMakeLists.txt read it from this line.
__version__ = "0.1.0"
