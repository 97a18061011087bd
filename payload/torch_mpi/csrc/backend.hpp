// torch's view of a group: c10d::Backend over one communicator.
//
// This layer checks arguments, turns tensors into memory and hands the rest to the engine:
// backend_reduce.cpp, backend_move.cpp and backend_p2p.cpp hold the operations.
#pragma once

#include "engine.hpp"
#include "p2p_work.hpp"
#include "tensor_memory.hpp"
#include "verify.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace torch_mpi {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<Work>;

// One per backend object; torch copies it when a group is split.
struct GroupOptions : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout) : c10d::Backend::Options("mpi", timeout) {}
};

class Backend : public c10d::Backend {
 public:
  // Made by all members of the group. `ranks` are the members' ranks in MPI_COMM_WORLD, in group
  // order; `store` (may be null) is the group's own. Throws DistBackendError when the members do
  // not come together within the timeout.
  static c10::intrusive_ptr<Backend> create(
      const std::vector<int>& ranks,
      c10::intrusive_ptr<c10d::Store> store,
      std::chrono::milliseconds timeout,
      const std::string& name);

  Backend(
      std::shared_ptr<Communicator> comm,
      std::shared_ptr<PeerWatch> peers,
      c10::intrusive_ptr<GroupOptions> options,
      std::vector<int> world_ranks);
  ~Backend() override;

  const std::string getBackendName() const override {
    return "mpi";
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  c10d::ErrorType getError() override {
    return engine_->usable() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
  }
  bool supportsSplitting() const override {
    return true;
  }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  void shutdown() override;
  void abort() override;
  // At exit: tells the others that this rank is gone and stops the worker, without MPI calls.
  void leave();

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts)
      override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  Operation operation(
      c10d::OpType type, const char* name, const char* title, std::chrono::milliseconds timeout);

  // Runs body(Waiter&) in the group's order; null when it is done already (sync call).
  // `bytes` decides whether the worker is woken at once; `say` describes the call for the check of
  // TORCH_DISTRIBUTED_DEBUG=DETAIL and is called in that mode only.
  template <typename Say, typename Body>
  WorkPtr submit(
      Operation op,
      bool async,
      int64_t bytes,
      const Tensors& inputs,
      const Tensors& outputs,
      std::shared_ptr<DeviceStreams> streams,
      Say&& say,
      Body&& body);

  WorkPtr start_p2p(Operation op, at::Tensor tensor, Direction direction, int peer, int tag);
  WorkPtr remember(WorkPtr work);
  void check_root(int64_t root, const char* name) const;

  std::shared_ptr<Engine> engine_;
  c10::intrusive_ptr<GroupOptions> options_;
  std::vector<int> world_ranks_;
  std::atomic<uint64_t> sequence_{0};
  const bool verify_; // TORCH_DISTRIBUTED_DEBUG=DETAIL
  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  bool closed_ = false;
};

// From this many bytes on moving takes longer than waking a thread.
constexpr int64_t kWorthWaking = 64 * 1024;

template <typename Say, typename Body>
WorkPtr Backend::submit(
    Operation op,
    bool async,
    int64_t bytes,
    const Tensors& inputs,
    const Tensors& outputs,
    std::shared_ptr<DeviceStreams> streams,
    Say&& say,
    Body&& body) {
  engine_->check_usable();
  op.number = ++sequence_;
  const auto enqueue = [&](std::function<void(Waiter&)> task) -> WorkPtr {
    if (streams) {
      for (const auto& list : {std::cref(inputs), std::cref(outputs)}) {
        for (const auto& t : list.get()) {
          streams->keep_alive(t);
        }
      }
    }
    auto work = c10::make_intrusive<CollectiveWork>(
        engine_, op, inputs, outputs, std::move(task), streams);
    engine_->enqueue(work, async && bytes >= kWorthWaking);
    if (!async) {
      work->wait(kNoTimeout);
    }
    return remember(work);
  };
  if (C10_UNLIKELY(verify_)) {
    return enqueue([what = describe_call(op.name, say()), body](Waiter& w) {
      verify_same_call(w, what);
      body(w);
    });
  }
  if (!async && !streams && !coalescing_ && title_if_profiling(op.profiling_title) == nullptr &&
      engine_->run_inline(op, body)) {
    return nullptr;
  }
  return enqueue(std::forward<Body>(body));
}

} // namespace torch_mpi
