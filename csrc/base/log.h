// The log: one line on stderr for each call, written at once so that lines of many processes do not mix.
//   [lightcc WARNING rank 1 host h 12:34:56.789] text
// Any thread may call.
#pragma once
#include <chrono>
#include <string>

namespace lightcc {

enum class Level : int { trace, debug, info, warning, error, fatal };  // the values of HOROVOD_LOG_LEVEL

// Lines below `level` are dropped. Before the first call: warnings and above, without rank and host.
void set_log(int level, bool hide_time, int rank, const std::string& host);

void log(Level, const std::string& text);

std::string log_line(Level, const std::string& text, std::chrono::system_clock::time_point);  // what log() writes

}  // namespace lightcc
