#include "waiting.hpp"

#include "errors.hpp"
#include "runtime.hpp"

#include <sched.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

namespace torch_mpi {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A caller looks without pause for so long (a wake-up costs more than a small exchange), then yields
// to whoever wants to run, then naps. Where more ranks than cores share a machine the peer cannot
// come while we look, so the first stage is short there.
constexpr auto kEagerFor = microseconds(100);
constexpr auto kEagerForCrowded = microseconds(3);
constexpr int kLooksPerClock = 8;
constexpr auto kYieldFor = milliseconds(3);
constexpr auto kShortestNap = microseconds(20);
constexpr auto kLongestNap = microseconds(500);
// The background thread shares its core with the backward pass: each look costs two switches.
constexpr int kBackgroundLooks = 20;
constexpr auto kShortestBackgroundNap = microseconds(50);
constexpr auto kLongestBackgroundNap = microseconds(200);

// From here on waiting is an event worth a word to the store.
constexpr auto kLongWait = milliseconds(1000);
constexpr auto kLookAroundEvery = milliseconds(500);

// A blocking call has this much more than the operation's timeout before the job is aborted: all
// ranks had arrived, so only a rank that gave up at the last moment can keep it waiting.
constexpr auto kBlockingMargin = std::chrono::seconds(10);

class BlockingRegistry {
 public:
  static BlockingRegistry& instance() {
    static BlockingRegistry* registry = new BlockingRegistry();
    return *registry;
  }

  uint64_t enter(Clock::time_point limit, std::string what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!running_) {
      running_ = true;
      std::thread([this] { watch(); }).detach();
    }
    calls_[++last_] = {limit, std::move(what)};
    return last_;
  }

  void leave(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.erase(id);
  }

 private:
  struct Call {
    Clock::time_point limit;
    std::string what;
  };

  void watch() {
    for (;;) {
      std::this_thread::sleep_for(milliseconds(500));
      std::lock_guard<std::mutex> lock(mutex_);
      const auto now = Clock::now();
      for (const auto& [id, call] : calls_) {
        if (now > call.limit) {
          abort_job(1, call.what + " is stuck in a blocking MPI call past its timeout: a rank has "
                                   "left the collective midway. Ending the job.");
        }
      }
    }
  }

  std::mutex mutex_;
  bool running_ = false;
  uint64_t last_ = 0;
  std::map<uint64_t, Call> calls_;
};

} // namespace

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr size_t kMost = 16;
  std::string text = "[";
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kMost) {
    text += c10::str(", and ", ranks.size() - kMost, " more");
  }
  return text + "]";
}

std::string Waiter::describe() const {
  return c10::str(
      "mpi ", name_.op, " (operation ", name_.number, " of group '", *name_.group, "', rank ",
      comm.rank(), " of ", comm.size(), ")");
}

bool Waiter::test(MPI_Request* requests, int n) {
  int done = 0;
  if (n == 1) {
    mpi_check(MPI_Test(requests, &done, &status_), name_.op);
    return done != 0;
  }
  statuses_.resize(n);
  const int rc = MPI_Testall(n, requests, &done, statuses_.data());
  if (C10_UNLIKELY(rc == MPI_ERR_IN_STATUS)) {
    for (const auto& status : statuses_) {
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) {
        mpi_check(status.MPI_ERROR, name_.op);
      }
    }
  }
  mpi_check(rc, name_.op);
  return done != 0;
}

void Waiter::wait_all(MPI_Request* requests, int n) {
  if (n == 0 || test(requests, n)) {
    return;
  }
  wait_patiently(requests, n);
}

void Waiter::wait_patiently(MPI_Request* requests, int n) {
  const bool caller = patience_ == Patience::Caller || threads_waiting_ > 0;
  const auto start = Clock::now();
  if (caller) {
    static const auto eager = Runtime::instance().crowded() ? kEagerForCrowded : kEagerFor;
    do {
      for (int look = 0; look < kLooksPerClock; ++look) {
        if (test(requests, n)) {
          return;
        }
      }
    } while (Clock::now() - start < eager);
  } else {
    for (int look = 0; look < kBackgroundLooks; ++look) {
      if (test(requests, n)) {
        return;
      }
    }
  }
  auto next_look_around = start + std::min<Clock::duration>(kLongWait, (deadline_ - start) / 4);
  auto nap = caller ? kShortestNap : kShortestBackgroundNap;
  const auto longest = caller ? kLongestNap : kLongestBackgroundNap;
  for (;;) {
    if (test(requests, n)) {
      break;
    }
    const auto now = Clock::now();
    if (now >= next_look_around || now >= deadline_ || aborted_) {
      look_around(now);
      next_look_around = std::min(deadline_, now + kLookAroundEvery);
    }
    if (caller && now - start < kYieldFor) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(nap + nap / 2, longest);
    }
  }
  if (announced_) {
    announced_ = false;
    peers_.withdraw(std::to_string(name_.number));
  }
}

void Waiter::look_around(Clock::time_point now) {
  if (aborted_) {
    give_up("the process group was aborted");
  }
  const auto number = std::to_string(name_.number);
  if (!announced_) {
    announced_ = true;
    peers_.announce(number);
  }
  if (const auto who = peers_.departed()) {
    give_up(*who + " will not take part any more");
  }
  if (now < deadline_) {
    return;
  }
  std::string text = c10::str("Timed out after ", timeout_.count(), " ms");
  const auto absent = peers_.missing(number);
  if (!absent) {
    text += "; which ranks are missing is not known (the store does not answer)";
  } else if (!absent->empty()) {
    text += "; ranks not yet arrived: " + list_ranks(*absent);
  } else {
    text += "; all ranks have arrived but the transfer did not end";
  }
  give_up(text + ". Raise timeout= in init_process_group or new_group if they are only slow");
}

void Waiter::give_up(const std::string& reason) {
  note_failure();
  throw Abandoned(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, describe() + ": " + reason);
}

void Waiter::wait_for_arrival() {
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_check(MPI_Ibarrier(comm.get(), &request), "MPI_Ibarrier");
  wait_all(&request, 1);
}

Waiter::Blocking::Blocking(const Waiter& waiter)
    : id_(BlockingRegistry::instance().enter(
          std::max(waiter.deadline_, Clock::now()) + kBlockingMargin, waiter.describe())) {}

Waiter::Blocking::~Blocking() {
  BlockingRegistry::instance().leave(id_);
}

} // namespace torch_mpi
