// The order of a group's collectives, and the thread that carries out the asynchronous ones.
//
// One operation of a group runs at a time, in the order of issue. Who runs it:
//   - the caller itself, when it waits anyway and nothing is queued (no hand-over, no wake-up);
//   - otherwise whoever comes first: the group's worker thread, or a thread that blocks in wait()
//     and carries out the queue up to its own operation.
#pragma once

#include "communicator.hpp"
#include "peer_watch.hpp"
#include "waiting.hpp"
#include "work.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace torch_mpi {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(std::shared_ptr<Communicator> comm, std::shared_ptr<PeerWatch> peers);
  ~Engine();

  // Runs body now if nothing is before it. False: nothing was done, enqueue it.
  template <typename Body>
  bool run_inline(const Operation& op, Body&& body);

  // urgent: wake the worker even from a nap, because much is to be moved while the caller computes.
  void enqueue(c10::intrusive_ptr<CollectiveWork> work, bool urgent);

  // Helps until the work is complete; false at the deadline.
  bool help(CollectiveWork& work, std::optional<Clock::time_point> until);

  // A waiter for an operation that runs outside the order (send, receive).
  Waiter waiter(const Operation& op, Patience patience);

  // Lets what is queued end, then stops the worker.
  void drain_and_stop();
  // The end of a group in good order: frees the communicator.
  void close();
  // Stops the worker after the operation that it runs, if any.
  void stop();
  // Fails what is queued and tells a running operation to give up.
  void abort(const std::string& why);

  // Throws when the group was given up.
  void check_usable() const;
  bool usable() const {
    return !failed_;
  }

  const std::shared_ptr<Communicator>& communicator() const {
    return comm_;
  }
  void set_group_name(const std::string& name) {
    group_name_ = name;
  }
  const std::string& group_name() const {
    return group_name_;
  }
  PeerWatch& peers() {
    return *peers_;
  }

  void fail(const std::string& why);

 private:
  bool try_begin();
  void end();
  void run(CollectiveWork& work, Patience patience);
  // Takes the first operation off the queue and carries it out, with the lock released meanwhile.
  void run_first(std::unique_lock<std::mutex>& lock, Patience patience);
  void start_worker();
  void worker_loop();

  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<PeerWatch> peers_;
  std::string group_name_ = "?";

  mutable std::mutex mutex_;
  std::condition_variable worker_wakes_;
  std::condition_variable ended_;
  std::deque<c10::intrusive_ptr<CollectiveWork>> queue_;
  bool busy_ = false;
  std::atomic<int> waiting_{0}; // threads in help() that sleep on ended_
  bool worker_asleep_ = false;
  bool urgent_ = false; // something in the queue is large
  bool stop_ = false;
  Clock::time_point last_enqueue_;
  // More than one only while callbacks of futures keep others from the queue.
  int workers_ = 0;
  int workers_in_callbacks_ = 0;

  std::atomic<bool> failed_{false};
  std::atomic<bool> aborted_{false};
  std::string failure_;
};

// Requests of a given-up operation are still known to MPI: what they point to is kept for ever.
void keep_for_ever(std::function<void(Waiter&)> body);

template <typename Body>
bool Engine::run_inline(const Operation& op, Body&& body) {
  if (!try_begin()) {
    return false;
  }
  Waiter w = waiter(op, Patience::Caller);
  try {
    body(w);
  } catch (const Refused&) {
    end();
    throw;
  } catch (const Abandoned& error) {
    keep_for_ever(std::forward<Body>(body));
    fail(error.what_without_backtrace());
    end();
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
    end();
    throw;
  }
  end();
  return true;
}

} // namespace torch_mpi
