#include "backend.hpp"

#include "errors.hpp"
#include "muster.hpp"
#include "runtime.hpp"

#include <future>
#include <numeric>
#include <thread>

namespace torch_mpi {

namespace {

// Several operations as one, for the coalescing manager.
class GroupWork : public Work {
 public:
  GroupWork(int rank, std::vector<WorkPtr> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    for (auto& work : works_) {
      if (!work->isCompleted()) {
        return false;
      }
    }
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }
  void synchronize() override {
    for (auto& work : works_) {
      work->synchronize();
    }
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (auto& work : works_) {
      for (auto& t : work->result()) {
        all.push_back(t);
      }
    }
    return all;
  }

 private:
  std::vector<WorkPtr> works_;
};

[[noreturn]] void raise_incomplete(
    const std::vector<int>& ranks,
    PeerWatch& peers,
    std::chrono::milliseconds timeout,
    const std::string& name) {
  note_failure();
  const auto absent = peers.missing("creation");
  raise_backend_error(c10::str(
      "mpi group '", name, "': not all ", ranks.size(), " members have come within ",
      timeout.count(), " ms",
      absent ? "; ranks not yet arrived: " + list_ranks(*absent) : std::string(),
      ". All members of a group must create it, in the same order of groups"));
}

// Waits until all members have come, and tells the store of this rank's arrival if that takes long.
void muster(
    const std::vector<int>& ranks,
    PeerWatch& peers,
    std::chrono::milliseconds timeout,
    const std::string& name) {
  auto& runtime = Runtime::instance();
  Muster members(runtime.control(), ranks, runtime.rank(), creation_tag(name));
  const auto start = Clock::now();
  const auto patience = std::min<std::chrono::milliseconds>(std::chrono::seconds(1), timeout / 4);
  bool announced = false;
  auto nap = std::chrono::microseconds(20);
  while (!members.complete()) {
    if (Clock::now() >= start + timeout) {
      raise_incomplete(ranks, peers, timeout, name);
    }
    if (!announced && Clock::now() >= start + patience) {
      peers.announce("creation");
      announced = true;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::microseconds(2000));
  }
  if (announced) {
    peers.withdraw("creation");
  }
}

// MPI_Comm_create_group cannot be interrupted. All members have come before it is called; the thread
// of its own is for one that gives up or dies in that very moment.
std::shared_ptr<Communicator> create_in_time(
    const std::vector<int>& ranks,
    PeerWatch& peers,
    std::chrono::milliseconds timeout,
    const std::string& name) {
  muster(ranks, peers, timeout, name);
  auto promise = std::make_shared<std::promise<std::shared_ptr<Communicator>>>();
  auto result = promise->get_future();
  std::thread([promise, ranks, name] {
    try {
      promise->set_value(Communicator::create(ranks, name));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (result.wait_for(timeout) != std::future_status::ready) {
    raise_incomplete(ranks, peers, timeout, name);
  }
  return result.get();
}

} // namespace

c10::intrusive_ptr<Backend> Backend::create(
    const std::vector<int>& ranks,
    c10::intrusive_ptr<c10d::Store> store,
    std::chrono::milliseconds timeout,
    const std::string& name) {
  const int me = Runtime::instance().rank();
  const auto here = std::find(ranks.begin(), ranks.end(), me);
  TORCH_CHECK_VALUE(
      here != ranks.end(), "mpi group '", name, "': rank ", me, " is not one of ", list_ranks(ranks));
  auto peers = std::make_shared<PeerWatch>(
      std::move(store), static_cast<int>(here - ranks.begin()), static_cast<int>(ranks.size()));
  auto comm = create_in_time(ranks, *peers, timeout, name);
  auto options = c10::make_intrusive<GroupOptions>(timeout);
  options->group_name = name;
  for (const int r : ranks) {
    options->global_ranks_in_group.push_back(r);
  }
  return c10::make_intrusive<Backend>(std::move(comm), std::move(peers), std::move(options), ranks);
}

Backend::Backend(
    std::shared_ptr<Communicator> comm,
    std::shared_ptr<PeerWatch> peers,
    c10::intrusive_ptr<GroupOptions> options,
    std::vector<int> world_ranks)
    : c10d::Backend(comm->rank(), comm->size()),
      engine_(std::make_shared<Engine>(comm, std::move(peers))),
      options_(std::move(options)),
      world_ranks_(std::move(world_ranks)),
      verify_(c10d::debug_level() == c10d::DebugLevel::Detail) {
  engine_->set_group_name(options_->group_name);
  init();
}

Backend::~Backend() {
  engine_->stop();
}

c10::intrusive_ptr<c10d::Backend> Backend::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  std::vector<int> world;
  for (const int r : ranks) {
    TORCH_CHECK_VALUE(
        r >= 0 && r < getSize(), "mpi: split rank ", r, " is not in the parent group of size ",
        getSize());
    world.push_back(world_ranks_[r]);
  }
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) {
    return nullptr;
  }
  const auto timeout = opts ? opts->timeout : options_->timeout;
  // Sibling groups need no different tags: no rank is in two of them.
  const auto name = opts && !opts->group_name.empty() ? opts->group_name
                                                      : options_->group_name + ":split";
  return create(world, store, timeout, name);
}

void Backend::shutdown() {
  if (std::exchange(closed_, true)) {
    return;
  }
  engine_->drain_and_stop();
  engine_->peers().depart("has destroyed the group");
  reap_orphans();
  engine_->close();
}

void Backend::abort() {
  engine_->abort("the process group was aborted");
  engine_->peers().depart("has aborted the group");
}

void Backend::leave() {
  if (!closed_) {
    engine_->peers().depart("has exited");
    engine_->stop();
  }
}

void Backend::startCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr Backend::endCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_ = false;
  return c10::make_intrusive<GroupWork>(getRank(), std::exchange(coalesced_, {}));
}

WorkPtr Backend::remember(WorkPtr work) {
  if (coalescing_) {
    std::lock_guard<std::mutex> lock(coalescing_mutex_);
    coalesced_.push_back(work);
  }
  return work;
}

Operation Backend::operation(
    c10d::OpType type, const char* name, const char* title, std::chrono::milliseconds timeout) {
  if (timeout == c10d::kUnsetTimeout || timeout == kNoTimeout) {
    timeout = options_->timeout;
  }
  return Operation{type, name, title, timeout, 0, Clock::now() + timeout};
}

void Backend::check_root(int64_t root, const char* name) const {
  TORCH_CHECK_VALUE(
      root >= 0 && root < getSize(), "mpi ", name, ": root rank ", root,
      " is not in the group of size ", getSize());
}

} // namespace torch_mpi
