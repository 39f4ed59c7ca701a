// One group at work: negotiates its requests and runs the batches in the agreed order. Only whoever holds the
// engine's baton calls it.
#pragma once
#include <deque>
#include <unordered_map>

#include "base/config.h"
#include "collective/links.h"
#include "engine/courier.h"
#include "engine/express.h"
#include "engine/negotiator.h"
#include "engine/phantom.h"
#include "engine/run.h"
#include "net/peers.h"

namespace lightcc {

// What a channel needs of the engine.
struct ChannelOwner {
  virtual ~ChannelOwner() = default;
  virtual void finish(const RequestPtr&, Code, const std::string& text) = 0;
  virtual void skip_name(int group, const std::string& key) = 0;  // the other members have used this automatic name
  virtual void change_groups(Request&) = 0;                     // add_group, remove_group: all ranks are at this point
  virtual void end_epoch(Code, const std::string& text) = 0;    // nobody can go on
  virtual void has_left(int rank) = 0;                          // of another host, in peace
  virtual void judge(const Message&) = 0;                       // Stuck, Plea: this rank is the world's coordinator
  virtual void accused(const Accuse&) = 0;
};

class Channel : public CourierOwner {
 public:
  Channel(Peers&, int group, std::vector<int> ranks, const Config&, Counters&, Tracing&, ChannelOwner&);

  const Members& members() const { return members_; }
  void submit(const RequestPtr&);
  Express& express() { return *express_; }
  bool may_express(const Collective&);                  // nothing is in flight in this group
  void adopt(const RequestPtr& request) { expressed_ = request; }  // whose call is on the express
  bool step();                                          // a bounded piece of work; true if anything moved
  void gone(int rank, const std::string& why);          // a rank that left in peace
  void fail_all(Code, const std::string& text);         // everything in flight
  // Is such a request of this rank in flight here?
  bool announced(Kind, bool automatic, const std::string& key) const;
  void stay_away(const std::string& key, const std::string& text) {  // this rank will not announce it, but others have
    courier_->say(Contest{key, text, {members_.index}});
  }
  bool idle() const { return pending_.empty() && runs_.empty() && !expressed_; }
  bool flush();                                         // true while messages wait for room
  void inspect(uint64_t now);                           // looks for stalls
  void remind();                                        // those whom this rank waits for
  Courier& courier() { return *courier_; }

 private:
  bool is_coordinator() const { return members_.index == 0; }
  void receive(int from, Message) override;
  void handle(Message) override;
  void farewell(int member, const std::string& why, int from) override;
  void left(int member, const std::string& why, int from);
  bool coordinate();
  bool run_front();
  bool step_express();
  void all_joined(const Entry&);
  uint64_t waits_since(const Request&) const;
  void look_for(Request&, bool running, uint64_t now);
  void report(Request&, const std::vector<int>& missing, const std::vector<int>& joined, uint64_t now);
  std::vector<int> silent_members(uint64_t now) const;
  std::string names(const std::vector<int>& members) const;

  Peers& peers_;
  const int group_;
  Members members_;
  Members here_;                                        // the same by Peers::local, if all share this host
  const Config& config_;
  Counters& counters_;
  Tracing& tracing_;
  ChannelOwner& owner_;

  std::unique_ptr<Courier> courier_;
  std::vector<std::unique_ptr<Link>> links_;            // data
  Ledger ledger_;
  std::unique_ptr<Coordinator> coordinator_;            // on member 0
  std::vector<std::pair<int, std::string>> queries_;    // to it, by member
  std::unordered_map<std::string, RequestPtr> pending_; // announced, not yet to run

  Selector selector_;
  std::unique_ptr<SharedBackend> shared_;               // and express_: if all share this host
  std::unique_ptr<Backend> by_links_;
  Run::Choose choose_;
  FusionBuffer buffer_;
  Phantom phantom_;
  std::deque<std::vector<Entry>> runs_;                 // agreed; the front one runs
  std::unique_ptr<Run> run_;
  std::unique_ptr<Express> express_;
  RequestPtr expressed_;                                // nullptr while its caller makes the steps itself
  uint64_t ran_ns_ = 0;                                 // when a batch last came to its end
  std::string gone_;                                    // why the first member left; empty: all are here
  std::vector<char> left_;                              // by member
};

}  // namespace lightcc
