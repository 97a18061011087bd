#include "p2p_work.hpp"

#include "engine.hpp"
#include "errors.hpp"
#include "requests.hpp"
#include "runtime.hpp"

#include <list>
#include <thread>

namespace torch_mpi {

namespace {

struct Orphan {
  std::vector<MPI_Request> requests;
  at::Tensor tensor;
  Dense memory;
};

struct Orphanage {
  std::mutex mutex;
  std::list<Orphan> orphans;

  static Orphanage& instance() {
    static auto* orphanage = new Orphanage();
    return *orphanage;
  }
};

} // namespace

void reap_orphans() {
  auto& house = Orphanage::instance();
  std::lock_guard<std::mutex> lock(house.mutex);
  house.orphans.remove_if([](Orphan& o) {
    int done = 0;
    const int rc = MPI_Testall(
        static_cast<int>(o.requests.size()), o.requests.data(), &done, MPI_STATUSES_IGNORE);
    return rc == MPI_SUCCESS && done;
  });
}

P2PWork::P2PWork(
    std::shared_ptr<Engine> engine,
    const Operation& op,
    at::Tensor tensor,
    Direction direction,
    int peer,
    int tag)
    : c10d::Work(
          engine->communicator()->rank(),
          op.type,
          title_if_profiling(op.profiling_title),
          std::vector<at::Tensor>{tensor}),
      engine_(std::move(engine)),
      op_(op),
      tensor_(std::move(tensor)),
      direction_(direction),
      peer_(peer),
      tag_(tag),
      memory_(tensor_, must_stage(tensor_)),
      streams_(DeviceStreams::of(tensor_)) {
  Session session(streams_.get());
  data_ = direction_ == Direction::Send ? memory_.load() : memory_.space();
  session.inputs_loaded();
  post(0);
}

P2PWork::~P2PWork() {
  if (done_ || requests_.empty()) {
    return;
  }
  if (direction_ == Direction::Receive) {
    for (auto& request : requests_) {
      if (request != MPI_REQUEST_NULL) {
        MPI_Cancel(&request);
      }
    }
  }
  auto& house = Orphanage::instance();
  std::lock_guard<std::mutex> lock(house.mutex);
  house.orphans.push_back({std::move(requests_), tensor_, std::move(memory_)});
}

// Messages of at most Requests::kPiece. A receive from any source posts the first one only: where
// the rest comes from is known when it has arrived. An empty tensor is one empty message.
void P2PWork::post(int64_t from) {
  const auto& comm = *engine_->communicator();
  const int64_t bytes = memory_.bytes();
  int64_t offset = from;
  do {
    const auto length = static_cast<int>(std::min(Requests::kPiece, bytes - offset));
    MPI_Request request = MPI_REQUEST_NULL;
    if (direction_ == Direction::Send) {
      mpi_check(
          MPI_Isend(data_ + offset, length, MPI_BYTE, peer_, tag_, comm.get(), &request),
          "MPI_Isend");
    } else {
      mpi_check(
          MPI_Irecv(data_ + offset, length, MPI_BYTE, peer_, tag_, comm.get(), &request),
          "MPI_Irecv");
    }
    requests_.push_back(request);
    offset += length;
  } while (offset < bytes && peer_ != MPI_ANY_SOURCE);
  statuses_.resize(requests_.size());
}

// Checks what the first message says: who sent it, and whether it is as long as the tensor.
bool P2PWork::settle_first(const MPI_Status& status) {
  const int64_t bytes = memory_.bytes();
  int got = 0;
  MPI_Get_count(&status, MPI_BYTE, &got);
  const bool was_any = peer_ == MPI_ANY_SOURCE;
  source_ = status.MPI_SOURCE;
  const int64_t wanted = std::min(Requests::kPiece, bytes);
  if (got != wanted) {
    done_ = true;
    raise_backend_error(c10::str(
        "mpi ", op_.name, ": rank ", source_, " sent ", got, " bytes (tag ", tag_, "), but the tensor ",
        tensor_.scalar_type(), " ", tensor_.sizes(), " holds ", bytes,
        ": send and receive tensors of the same size"));
  }
  if (was_any && bytes > Requests::kPiece) {
    peer_ = source_;
    requests_.clear();
    post(Requests::kPiece);
    return false;
  }
  return true;
}

bool P2PWork::test() {
  int done = 0;
  const int n = static_cast<int>(requests_.size());
  const int rc = MPI_Testall(n, requests_.data(), &done, statuses_.data());
  if (rc == MPI_ERR_IN_STATUS) {
    for (const auto& status : statuses_) {
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) {
        done_ = true;
        mpi_check(status.MPI_ERROR, op_.name);
      }
    }
  }
  mpi_check(rc, op_.name);
  if (!done) {
    return false;
  }
  if (direction_ == Direction::Receive && source_ < 0) {
    if (!settle_first(statuses_[0])) {
      return false;
    }
  }
  finish_locked();
  return true;
}

void P2PWork::finish_locked() {
  done_ = true;
  if (direction_ == Direction::Receive) {
    Session session(streams_.get());
    memory_.store();
    session.outputs_stored();
  }
  memory_ = Dense();
}

bool P2PWork::isCompleted() {
  if (c10d::Work::isCompleted()) {
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_p2p_);
  if (done_) {
    return true;
  }
  try {
    if (!test()) {
      return false;
    }
    finish();
  } catch (...) {
    finish(std::current_exception());
  }
  return true;
}

bool P2PWork::wait(std::chrono::milliseconds timeout) {
  Operation op = op_;
  if (timeout != kNoTimeout) {
    op.timeout = timeout;
    op.deadline = Clock::now() + timeout;
  }
  const auto until = op.deadline;
  int looks = 0;
  auto nap = std::chrono::microseconds(20);
  auto look_around = Clock::now() + std::chrono::seconds(1);
  while (!isCompleted()) {
    if (++looks < 200) {
      continue;
    }
    const auto now = Clock::now();
    if (now > look_around || now > until) {
      look_around = now + std::chrono::milliseconds(500);
      engine_->check_usable();
      const auto who = peer_ == MPI_ANY_SOURCE ? std::string("any rank") : c10::str("rank ", peer_);
      const auto gone = engine_->peers().departed();
      if (now > until || gone) {
        const auto& comm = *engine_->communicator();
        raise_backend_error(c10::str(
            "mpi ", op.name, " (group '", engine_->group_name(), "', rank ", comm.rank(), " of ",
            comm.size(), ", peer ", who, ", tag ", tag_, "): ",
            gone ? *gone + " will not take part any more"
                 : c10::str("Timed out after ", op.timeout.count(), " ms; the peer has not come")));
      }
    }
    if (looks < 4000) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(nap * 2, std::chrono::microseconds(500));
    }
  }
  synchronize();
  return true;
}

void P2PWork::synchronize() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = exception_;
  }
  if (error) {
    std::rethrow_exception(error);
  }
  if (streams_ && direction_ == Direction::Receive) {
    streams_->block_current_streams();
  }
}

int P2PWork::sourceRank() const {
  return source_;
}

// MPI moves data only while somebody calls it, so a future needs a thread that does.
c10::intrusive_ptr<c10::ivalue::Future> P2PWork::getFuture() {
  std::vector<c10::Device> devices;
  if (!tensor_.device().is_cpu()) {
    devices.push_back(tensor_.device());
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), devices);
  auto self = c10::intrusive_ptr<P2PWork>::unsafe_reclaim_from_nonowning(this);
  std::thread([self, future] {
    try {
      self->wait(kNoTimeout);
      future->markCompleted(c10::IValue(std::vector<at::Tensor>{self->tensor_}));
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  }).detach();
  return future;
}

} // namespace torch_mpi
