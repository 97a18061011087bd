#include "engine.hpp"

#include "errors.hpp"

#include <sys/prctl.h>

namespace torch_mpi {

namespace {

// While operations keep coming the worker looks into the queue by itself, so that issuing a small
// one needs no system call; a quiet group's worker sleeps until it is woken.
constexpr auto kWorkerNap = std::chrono::microseconds(300);
constexpr auto kWorkerAttentive = std::chrono::milliseconds(20);
// Most small operations are waited for at once, and the waiting thread is quicker at them than a
// hand-over: the worker leaves them alone for so long.
constexpr auto kLeaveToCaller = std::chrono::microseconds(200);

thread_local Engine* t_worker_of = nullptr;

} // namespace

void keep_for_ever(std::function<void(Waiter&)> body) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::function<void(Waiter&)>>();
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(body));
}

Engine::Engine(std::shared_ptr<Communicator> comm, std::shared_ptr<PeerWatch> peers)
    : comm_(std::move(comm)), peers_(std::move(peers)) {}

Engine::~Engine() = default; // the workers hold a reference, so they have left their loops

Waiter Engine::waiter(const Operation& op, Patience patience) {
  return Waiter(
      *comm_, *peers_, OpName{op.name, op.number, &group_name_}, op.deadline, op.timeout, patience,
      aborted_, waiting_);
}

bool Engine::try_begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (busy_ || !queue_.empty()) {
    return false;
  }
  busy_ = true;
  return true;
}

void Engine::end() {
  bool wake_worker;
  bool wake_waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
    wake_waiting = waiting_ > 0;
    wake_worker = worker_asleep_ && !queue_.empty();
  }
  if (wake_waiting) {
    ended_.notify_all();
  }
  if (wake_worker) {
    worker_wakes_.notify_one();
  }
}

void Engine::run(CollectiveWork& work, Patience patience) {
  if (failed_) {
    try {
      check_usable();
    } catch (...) {
      work.refuse(std::current_exception());
    }
    return;
  }
  Waiter w = waiter(work.operation(), patience);
  if (const auto error = work.execute(w)) {
    try {
      std::rethrow_exception(error);
    } catch (const Refused&) {
      // All ranks have refused it alike: the group is in step and stays usable.
    } catch (const c10::Error& e) {
      fail(e.what_without_backtrace());
    } catch (const std::exception& e) {
      fail(e.what());
    }
  }
}

void Engine::enqueue(c10::intrusive_ptr<CollectiveWork> work, bool urgent) {
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    const auto now = Clock::now();
    if (queue_.size() == 1) {
      last_enqueue_ = now; // since when something waits
      urgent_ = false;
    }
    urgent_ = urgent_ || urgent;
    wake = urgent || worker_asleep_;
    if (workers_ == workers_in_callbacks_) {
      start_worker();
      wake = false;
    }
  }
  if (wake) {
    worker_wakes_.notify_one();
  }
}

void Engine::run_first(std::unique_lock<std::mutex>& lock, Patience patience) {
  const auto work = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  lock.unlock();
  run(*work, patience);
  end();
  work->complete_future();
  lock.lock();
}

void Engine::start_worker() {
  ++workers_;
  std::thread([self = shared_from_this()] { self->worker_loop(); }).detach();
}

bool Engine::help(CollectiveWork& work, std::optional<Clock::time_point> until) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!work.isCompleted()) {
    if (!busy_ && !queue_.empty()) {
      run_first(lock, Patience::Caller);
      continue;
    }
    ++waiting_;
    std::cv_status status = std::cv_status::no_timeout;
    if (until) {
      status = ended_.wait_until(lock, *until);
    } else {
      ended_.wait(lock);
    }
    --waiting_;
    if (status == std::cv_status::timeout && !work.isCompleted()) {
      return false;
    }
  }
  return true;
}

void Engine::worker_loop() {
  prctl(PR_SET_NAME, "torch_mpi", 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); // naps of 20 µs would last 70 µs otherwise
  t_worker_of = this;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ || !queue_.empty()) {
    if (workers_ - workers_in_callbacks_ > 1) {
      break; // stood in for a worker that is back from its callbacks
    }
    if (!busy_ && !queue_.empty() && !stop_ && !urgent_ &&
        Clock::now() - last_enqueue_ < kLeaveToCaller) {
      worker_wakes_.wait_for(lock, kLeaveToCaller);
    } else if (!busy_ && !queue_.empty()) {
      if (queue_.size() == 1) {
        urgent_ = false;
      }
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      run(*work, Patience::Background);
      end();
      lock.lock();
      ++workers_in_callbacks_;
      lock.unlock();
      work->complete_future();
      lock.lock();
      --workers_in_callbacks_;
    } else if (!busy_ && Clock::now() - last_enqueue_ < kWorkerAttentive) {
      worker_wakes_.wait_for(lock, kWorkerNap);
    } else {
      worker_asleep_ = true;
      worker_wakes_.wait(lock);
      worker_asleep_ = false;
    }
  }
  --workers_;
  lock.unlock();
  ended_.notify_all();
}

void Engine::drain_and_stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (busy_ || !queue_.empty()) {
      if (!busy_) {
        run_first(lock, Patience::Caller);
        continue;
      }
      ++waiting_;
      ended_.wait(lock);
      --waiting_;
    }
  }
  stop();
}

void Engine::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) {
      return;
    }
    failure_ = "it was destroyed";
    failed_ = true;
  }
  comm_->release();
}

void Engine::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  worker_wakes_.notify_all();
  std::unique_lock<std::mutex> lock(mutex_);
  const int own = t_worker_of == this ? 1 : 0; // called from a callback
  ++waiting_;
  ended_.wait_for(lock, std::chrono::seconds(2), [&] { return workers_ <= own; });
  --waiting_;
}

void Engine::fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_) {
    failure_ = why;
    failed_ = true;
    comm_->condemn();
  }
}

void Engine::abort(const std::string& why) {
  fail(why);
  aborted_ = true;
}

void Engine::check_usable() const {
  if (C10_LIKELY(!failed_)) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  raise_backend_error(
      "mpi group '" + group_name_ + "' cannot be used any more: " + failure_);
}

} // namespace torch_mpi
