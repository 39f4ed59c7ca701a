// Prints docs/knobs.md.
#include <iostream>

#include "base/config.h"

int main() { std::cout << lightcc::knobs_markdown(); }
