#include "communicator.hpp"

#include "errors.hpp"
#include "runtime.hpp"

#include <atomic>

namespace torch_mpi {

namespace {

std::atomic<int> g_live{0};
constexpr int kInternalTags = 16;

class Group {
 public:
  Group(MPI_Group parent, const std::vector<int>& ranks) {
    mpi_check(
        MPI_Group_incl(parent, static_cast<int>(ranks.size()), ranks.data(), &group_),
        "MPI_Group_incl");
  }
  ~Group() {
    MPI_Group_free(&group_);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  MPI_Group get() const {
    return group_;
  }

 private:
  MPI_Group group_ = MPI_GROUP_NULL;
};

} // namespace

int creation_tag(const std::string& name) {
  uint32_t hash = 2166136261u; // FNV-1a: the same on all ranks, unlike std::hash
  for (const unsigned char c : name) {
    hash = (hash ^ c) * 16777619u;
  }
  return static_cast<int>(hash % 32768u); // MPI promises tags up to 32767
}

char* Scratch::at_least(size_t bytes) {
  if (bytes > capacity_) {
    constexpr size_t kAlign = 4096;
    const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
    memory_.reset(static_cast<char*>(std::aligned_alloc(kAlign, rounded)));
    TORCH_CHECK_WITH(DistBackendError, memory_, "mpi: no memory for ", rounded, " bytes of scratch");
    capacity_ = rounded;
  }
  return memory_.get();
}

std::shared_ptr<Communicator> Communicator::create(
    const std::vector<int>& ranks, const std::string& name) {
  auto& runtime = Runtime::instance();
  const Group group(runtime.world_group(), ranks);
  MPI_Comm comm = MPI_COMM_NULL;
  mpi_check(
      MPI_Comm_create_group(runtime.control(), group.get(), creation_tag(name), &comm),
      "MPI_Comm_create_group");
  return std::shared_ptr<Communicator>(new Communicator(comm, runtime.on_one_node(ranks)));
}

Communicator::Communicator(MPI_Comm comm, bool single_node)
    : comm_(comm), single_node_(single_node) {
  ++g_live;
  mpi_check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

Communicator::~Communicator() {
  release();
}

void Communicator::release() {
  if (comm_ != MPI_COMM_NULL && !condemned_ && !Runtime::finalized()) {
    MPI_Comm_free(&comm_);
    --g_live;
  }
}

int Communicator::max_user_tag() const {
  return Runtime::instance().max_tag() - kInternalTags;
}

int Communicator::internal_tag(int which) const {
  return Runtime::instance().max_tag() - which;
}

int Communicator::live() {
  return g_live;
}

} // namespace torch_mpi
