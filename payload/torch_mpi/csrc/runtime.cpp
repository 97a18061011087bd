#include "runtime.hpp"

#include "errors.hpp"

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace torch_mpi {

namespace {

std::atomic<bool> g_started{false};
std::atomic<bool> g_failed{false};

// A rank that exits with an error gives the others this long to come to the same end (they may be
// writing a checkpoint) before it takes the job down. Whoever waits for it in a collective learns
// of its departure at once through the store.
constexpr auto kGraceAfterError = std::chrono::seconds(5);

std::string describe_library() {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = {0};
  int length = 0;
  MPI_Get_library_version(version, &length);
  std::string text(version, length);
  text = text.substr(0, text.find('\n'));
  if (const auto end = text.find(", ident"); end != std::string::npos) {
    text.resize(end);
  }
  Dl_info info{};
  const bool found = dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) != 0;
  return text + " (" + (found && info.dli_fname ? info.dli_fname : "path unknown") + ")";
}

bool query_cuda_aware() {
#if defined(MPIX_CUDA_AWARE_SUPPORT) || defined(OMPI_HAVE_MPI_EXT_CUDA)
  return MPIX_Query_cuda_support() == 1;
#else
  return false; // MPICH: no portable question, so device memory is staged
#endif
}

struct FarewellArgs {
  MPI_Comm control;
  int rank;
  pid_t pid;
};

// Runs inside exit(), after Python is gone, and is told the exit status. A clean exit waits for the
// other ranks as MPI_Finalize would, but asleep; an exit with an error waits a little.
void farewell(int status, void* raw) {
  const auto* args = static_cast<const FarewellArgs*>(raw);
  if (getpid() != args->pid || Runtime::finalized()) {
    return; // a forked child, or mpi4py was here first
  }
  const bool bounded = status != 0 || g_failed;
  const auto limit = std::chrono::steady_clock::now() + kGraceAfterError;
  MPI_Request request = MPI_REQUEST_NULL;
  int done = 0;
  int rc = MPI_Ibarrier(args->control, &request);
  auto nap = std::chrono::microseconds(20);
  while (rc == MPI_SUCCESS) {
    rc = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (rc != MPI_SUCCESS || done) {
      break;
    }
    if (bounded && std::chrono::steady_clock::now() > limit) {
      break;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::microseconds(2000));
  }
  if (!done) {
    abort_job(
        status != 0 ? status : 1,
        c10::str("rank ", args->rank, " exits with status ", status,
                 " after an error and the other ranks do not: ending the job"));
  }
  if (g_failed) {
    // Requests that were given up may still be pending and MPI_Finalize may wait for them.
    std::thread([] {
      std::this_thread::sleep_for(kGraceAfterError);
      std::_Exit(1);
    }).detach();
  }
  MPI_Finalize();
}

} // namespace

bool Runtime::started() {
  return g_started;
}

bool Runtime::finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

Runtime& Runtime::instance() {
  // Leaked: communicators may outlive static destruction, and exit() runs farewell() anyway.
  static Runtime* runtime = new Runtime();
  return *runtime;
}

Runtime::Runtime() {
  TORCH_CHECK_WITH(
      DistBackendError, !finalized(),
      "mpi: MPI_Finalize has been called already (by mpi4py?), MPI cannot start twice in a process");
  int initialized = 0;
  MPI_Initialized(&initialized);
  int provided = MPI_THREAD_SINGLE;
  if (initialized) {
    mpi_check(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    owner_ = true;
    // MPICH raises errors of MPI_Testall here, whatever communicator the requests belong to.
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  library_ = describe_library();
  TORCH_CHECK_WITH(
      DistBackendError, provided >= MPI_THREAD_MULTIPLE,
      "mpi: ", library_, " grants thread level ", provided, ", wanted MPI_THREAD_MULTIPLE (",
      MPI_THREAD_MULTIPLE, "). ",
      initialized ? "MPI was initialised before torch used it: with mpi4py set "
                    "mpi4py.rc.thread_level = 'multiple' before importing MPI."
                  : "Use an MPI that was built with thread support.");
  mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &control_), "MPI_Comm_dup");
  mpi_check(MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_group(control_, &world_group_), "MPI_Comm_group");
  mpi_check(MPI_Comm_rank(control_, &rank_), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(control_, &size_), "MPI_Comm_size");
  int* bound = nullptr;
  int present = 0;
  mpi_check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &present), "MPI_Comm_get_attr");
  if (present) {
    max_tag_ = *bound;
  }
  cuda_aware_ = query_cuda_aware();
  find_nodes();
  if (owner_) {
    on_exit(farewell, new FarewellArgs{control_, rank_, getpid()});
  }
  g_started = true;
}

void Runtime::find_nodes() {
  MPI_Comm local = MPI_COMM_NULL;
  mpi_check(
      MPI_Comm_split_type(control_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
      "MPI_Comm_split_type");
  int lowest = 0;
  mpi_check(MPI_Allreduce(&rank_, &lowest, 1, MPI_INT, MPI_MIN, local), "MPI_Allreduce");
  MPI_Comm_free(&local);
  node_of_.resize(size_);
  mpi_check(
      MPI_Allgather(&lowest, 1, MPI_INT, node_of_.data(), 1, MPI_INT, control_), "MPI_Allgather");
}

bool Runtime::on_one_node(const std::vector<int>& ranks) const {
  for (const int r : ranks) {
    if (node_of_.at(r) != node_of_.at(ranks.front())) {
      return false;
    }
  }
  return true;
}

bool Runtime::crowded() const {
  const auto ranks = std::count(node_of_.begin(), node_of_.end(), node_of_.at(rank_));
  return ranks > sysconf(_SC_NPROCESSORS_ONLN);
}

void abort_job(int status, const std::string& why) {
  std::fprintf(stderr, "torch_mpi: %s\n", why.c_str());
  std::fflush(stderr);
  if (Runtime::started() && !Runtime::finalized()) {
    MPI_Abort(MPI_COMM_WORLD, status);
  }
  std::_Exit(status);
}

void note_failure() {
  g_failed = true;
}

} // namespace torch_mpi
