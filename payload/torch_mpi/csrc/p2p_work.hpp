// Sends and receives: outside the order of the collectives, posted to MPI at once.
#pragma once

#include "tensor_memory.hpp"
#include "work.hpp"

#include <mutex>

namespace torch_mpi {

enum class Direction { Send, Receive };

class P2PWork : public c10d::Work {
 public:
  // peer may be MPI_ANY_SOURCE for a receive.
  P2PWork(
      std::shared_ptr<Engine> engine,
      const Operation& op,
      at::Tensor tensor,
      Direction direction,
      int peer,
      int tag);
  ~P2PWork() override;

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override {
    return {tensor_};
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override {
    return op_.number;
  }

 private:
  void post(int64_t from);
  // Holds mutex_p2p_. Both return whether everything has been transferred.
  bool test();
  bool settle_first(const MPI_Status& status);
  void finish_locked();

  std::shared_ptr<Engine> engine_;
  Operation op_;
  at::Tensor tensor_;
  Direction direction_;
  int peer_;
  int tag_;
  Dense memory_;
  std::shared_ptr<DeviceStreams> streams_;
  char* data_ = nullptr;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  int source_ = -1;
  bool done_ = false;
  std::mutex mutex_p2p_;
};

// Requests whose Work was dropped before they ended; their memory lives until they have.
void reap_orphans();

} // namespace torch_mpi
