// Waiting for MPI requests: how long, how impatiently, and what to say when nobody comes.
#pragma once

#include "communicator.hpp"
#include "peer_watch.hpp"

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

namespace torch_mpi {

using Clock = std::chrono::steady_clock;

// A caller that blocks has nothing better to do than to look again at once; a background thread
// shares its core with the backward pass and must sleep between looks.
enum class Patience { Caller, Background };

// What runs, for messages and for the store. `number` counts the collectives of a group.
struct OpName {
  const char* op;
  uint64_t number;
  const std::string* group;
};

// Thrown when an operation is given up while its requests are pending: the buffers must live on.
class Abandoned : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

// Thrown on all ranks alike, before anything was transferred: the group stays usable.
class Refused : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

// The environment of one running operation.
class Waiter {
 public:
  Waiter(
      Communicator& comm,
      PeerWatch& peers,
      OpName name,
      Clock::time_point deadline,
      std::chrono::milliseconds timeout,
      Patience patience,
      const std::atomic<bool>& aborted,
      const std::atomic<int>& threads_waiting)
      : comm(comm),
        peers_(peers),
        name_(name),
        deadline_(deadline),
        timeout_(timeout),
        patience_(patience),
        aborted_(aborted),
        threads_waiting_(threads_waiting) {}

  // Returns when all n requests are complete and sets them to MPI_REQUEST_NULL. Throws Abandoned
  // after the timeout, when a member of the group has left, or when the group was aborted.
  void wait_all(MPI_Request* requests, int n);

  // Returns when all members are in this operation. Comes before every blocking MPI call, which
  // could neither be interrupted nor sleep.
  void wait_for_arrival();

  // Whether this and the following blocking calls take longer than the timeout allows is watched
  // by a thread that can only abort the job: from inside a blocking call nothing can be thrown.
  class Blocking {
   public:
    explicit Blocking(const Waiter& waiter);
    ~Blocking();
    Blocking(const Blocking&) = delete;
    Blocking& operator=(const Blocking&) = delete;

   private:
    uint64_t id_;
  };

  std::string describe() const;

  // Of the last single request that completed.
  const MPI_Status& status() const {
    return status_;
  }

  Communicator& comm;

 private:
  bool test(MPI_Request* requests, int n);
  void wait_patiently(MPI_Request* requests, int n);
  void look_around(Clock::time_point now);
  [[noreturn]] void give_up(const std::string& reason);

  PeerWatch& peers_;
  OpName name_;
  Clock::time_point deadline_;
  std::chrono::milliseconds timeout_;
  Patience patience_;
  const std::atomic<bool>& aborted_;
  const std::atomic<int>& threads_waiting_; // for this group: they are in a hurry
  MPI_Status status_{};
  std::vector<MPI_Status> statuses_;
  bool announced_ = false;
};

// "[1, 3]", at most 16 of them.
std::string list_ranks(const std::vector<int>& ranks);

} // namespace torch_mpi
