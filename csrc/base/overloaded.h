// One callable out of several, each for other arguments: what std::visit takes to tell a variant's alternatives apart.
// An alternative that none of them takes does not compile.
#pragma once

namespace lightcc {

template <class... Cases> struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases> Overloaded(Cases...) -> Overloaded<Cases...>;

}  // namespace lightcc
