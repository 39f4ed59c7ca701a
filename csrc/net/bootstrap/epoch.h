// An epoch of a job, as one process counts them.
#pragma once
#include <string>

namespace lightcc {

struct Epoch {
  int number = 0;  // of the job's inits
  // The name at which the ranks of one host exchange their infos in it, if the epoch before has distributed one. Unlike
  // the first epoch's, which is made from the job's name, nobody can guess it and bind it first.
  std::string socket_name;
};

}  // namespace lightcc
