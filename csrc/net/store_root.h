// Rank 0's side of the Store: serves all ranks from within exchange(), in one epoll loop.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "net/store.h"
#include "net/store_frames.h"

namespace lightcc {

class StoreRoot : public Store {
 public:
  StoreRoot(int size, const Terms&, Fd listener);
  std::vector<std::string> exchange(const std::string& mine, uint64_t deadline_ns) override;
  void fail(const Error&) override;
  Address way_to_root() const override { return {}; }
  Address own_address() const override { return own_; }

 private:
  struct Guest {  // a connection
    Guest(Fd socket, const Terms& terms) : fd(std::move(socket)), shake(Handshake::acceptor(terms, 0)) {}
    Fd fd;
    Handshake shake;
    Address seen, at;       // its end and ours
    uint64_t since_ns = 0;  // accepted
    FrameReader frames{kMostNoteBytes + 64};
    bool come = false;                // it has brought a note, so it is the rank's connection
    std::optional<std::string> note;  // of the round that is not complete yet
    std::deque<std::shared_ptr<const std::string>> out;
    size_t sent = 0;       // of the first in `out`
    bool leaving = false;  // nothing more will be said to it; it shall close
    int rank() const { return shake.hello().from; }
  };
  void serve(uint64_t until_ns);  // waits for something to happen and does what it asks for
  void accept_all();
  void on_readable(Guest&);
  void on_bytes(Guest&, std::string_view);
  void on_handshake(Guest&);
  void on_frame(Guest&, const Frame&);
  void say(Guest&, std::shared_ptr<const std::string>);
  void flush(Guest&);
  void drop(Guest&);  // it is gone, or shall be
  bool is_dropped(const Guest&) const;
  void drop_strangers();
  void tell_failure();
  [[noreturn]] void end();          // tells and throws it
  std::vector<int> absent() const;  // ranks that have brought no note to this round
  Error missing(const std::vector<int>&, uint64_t deadline_ns) const;

  const int size_;
  const Terms terms_;
  const Fd listener_, epoll_;
  const uint64_t opened_ns_;
  uint64_t deadline_ns_ = 0, swept_ns_ = 0;
  std::map<int, Guest> guests_;  // by descriptor
  std::vector<Guest*> by_rank_;  // once they have come
  std::vector<int> gone_;        // ranks that left after they had got all notes
  std::set<int> told_;           // ranks that know of the failure
  std::vector<int> dropped_;     // descriptors to close when the events at hand are done with
  int round_ = 0, noted_ = 0, unsent_ = 0;
  bool complete_ = false;  // the round's notes are on their way to all
  int strangers_ = 0;
  std::string refused_;  // why a process of this job was refused last
  Address own_;
  std::optional<Error> failure_;
};

}  // namespace lightcc
