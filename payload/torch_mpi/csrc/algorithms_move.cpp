// Collectives that only move bytes.
#include "algorithms.hpp"
#include "errors.hpp"
#include "requests.hpp"

#include <cstdlib>
#include <cstring>
#include <string_view>

namespace torch_mpi {

namespace {

constexpr int kTagMove = 1;
// At most this many peers are talked to at once.
constexpr int kWindow = 32;

void copy_own(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memmove(to, from, bytes);
  }
}

// A block of `bytes` of a larger row of `stride`, so that MPI places rank r's block at r * stride.
class StridedBlock {
 public:
  StridedBlock(int64_t bytes, int64_t stride) {
    MPI_Datatype plain = MPI_DATATYPE_NULL;
    mpi_check(
        MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &plain), "MPI_Type_contiguous");
    const int rc = MPI_Type_create_resized(plain, 0, stride, &type_);
    MPI_Type_free(&plain);
    mpi_check(rc, "MPI_Type_create_resized");
    mpi_check(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~StridedBlock() {
    MPI_Type_free(&type_);
  }
  StridedBlock(const StridedBlock&) = delete;
  StridedBlock& operator=(const StridedBlock&) = delete;
  MPI_Datatype get() const {
    return type_;
  }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

void wait_for(Waiter& w, MPI_Request request) {
  w.wait_all(&request, 1);
}

} // namespace

bool use_direct(const Communicator& comm) {
  static const int forced = [] {
    const char* value = std::getenv("TORCH_MPI_ALGORITHM");
    if (value == nullptr || *value == '\0') {
      return -1;
    }
    const std::string_view text(value);
    TORCH_CHECK_VALUE(
        text == "direct" || text == "library",
        "TORCH_MPI_ALGORITHM is '", value, "', wanted 'direct', 'library' or nothing");
    return text == "direct" ? 1 : 0;
  }();
  return forced >= 0 ? forced == 1 : comm.single_node();
}

Blocks Blocks::even(void* base, int n, int64_t bytes_each) {
  Blocks blocks(n);
  for (int r = 0; r < n; ++r) {
    blocks.data[r] = static_cast<char*>(base) + r * bytes_each;
    blocks.bytes[r] = bytes_each;
  }
  return blocks;
}

void barrier(Waiter& w) {
  w.wait_for_arrival();
}

void broadcast(Waiter& w, void* data, int64_t bytes, int root) {
  if (bytes <= kSmallBytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(
        MPI_Ibcast(data, static_cast<int>(bytes), MPI_BYTE, root, w.comm.get(), &request),
        "MPI_Ibcast");
    wait_for(w, request);
    return;
  }
  w.wait_for_arrival();
  const Waiter::Blocking blocking(w);
  for (int64_t offset = 0; offset < bytes; offset += Requests::kPiece) {
    const auto length = static_cast<int>(std::min(Requests::kPiece, bytes - offset));
    mpi_check(
        MPI_Bcast(static_cast<char*>(data) + offset, length, MPI_BYTE, root, w.comm.get()),
        "MPI_Bcast");
  }
}

void exchange(Waiter& w, const Blocks& send, const Blocks& recv, Memory memory) {
  const int n = w.comm.size();
  const int me = w.comm.rank();
  const int tag = w.comm.internal_tag(kTagMove);
  Requests requests(w);
  int first = 0;
  if (memory == Memory::Host) {
    copy_own(recv.data[me], send.data[me], std::min(send.bytes[me], recv.bytes[me]));
    first = 1;
  }
  // Step i pairs each rank with its i-th neighbour, so no rank is everyone's first target.
  for (int i = first; i < n; ++i) {
    const int to = (me + i) % n;
    const int from = (me - i + n) % n;
    requests.receive(recv.data[from], recv.bytes[from], from, tag);
    requests.send(send.data[to], send.bytes[to], to, tag);
    if (requests.size() >= 2 * kWindow) {
      requests.wait();
    }
  }
  requests.wait();
}

void allgather(Waiter& w, const void* input, int64_t bytes, const Blocks& output, Memory memory) {
  Blocks send(w.comm.size());
  for (int r = 0; r < w.comm.size(); ++r) {
    send.data[r] = static_cast<char*>(const_cast<void*>(input));
    send.bytes[r] = bytes;
  }
  exchange(w, send, output, memory);
}

void allgather_even(
    Waiter& w, const void* input, int64_t bytes_each, void* output, Memory memory) {
  const int n = w.comm.size();
  if (bytes_each * n <= kSmallBytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int count = static_cast<int>(bytes_each);
    const bool in_place = static_cast<char*>(output) + w.comm.rank() * bytes_each == input;
    mpi_check(
        MPI_Iallgather(
            in_place ? MPI_IN_PLACE : input, count, MPI_BYTE, output, count, MPI_BYTE,
            w.comm.get(), &request),
        "MPI_Iallgather");
    wait_for(w, request);
    return;
  }
  if (use_direct(w.comm)) {
    allgather(w, input, bytes_each, Blocks::even(output, n, bytes_each), memory);
    return;
  }
  w.wait_for_arrival();
  const Waiter::Blocking blocking(w);
  const char* mine = static_cast<char*>(output) + w.comm.rank() * bytes_each;
  const bool in_place = mine == input;
  for (int64_t offset = 0; offset < bytes_each; offset += Requests::kPiece) {
    const auto length = std::min(Requests::kPiece, bytes_each - offset);
    const StridedBlock block(length, bytes_each);
    mpi_check(
        MPI_Allgather(
            in_place ? MPI_IN_PLACE : static_cast<const char*>(input) + offset, in_place ? 0 : 1,
            block.get(), static_cast<char*>(output) + offset, 1, block.get(), w.comm.get()),
        "MPI_Allgather");
  }
}

void gather(Waiter& w, const void* input, int64_t bytes, const Blocks& output, int root, Memory m) {
  const int tag = w.comm.internal_tag(kTagMove);
  Requests requests(w);
  if (w.comm.rank() != root) {
    requests.send(input, bytes, root, tag);
  } else {
    if (m == Memory::Host) {
      copy_own(output.data[root], input, bytes);
    } else {
      requests.receive(output.data[root], bytes, root, tag);
      requests.send(input, bytes, root, tag);
    }
    for (int r = 0; r < w.comm.size(); ++r) {
      if (r != root) {
        requests.receive(output.data[r], output.bytes[r], r, tag);
      }
    }
  }
  requests.wait();
}

void scatter(Waiter& w, const Blocks& input, void* output, int64_t bytes, int root, Memory m) {
  const int tag = w.comm.internal_tag(kTagMove);
  Requests requests(w);
  if (w.comm.rank() != root) {
    requests.receive(output, bytes, root, tag);
  } else {
    if (m == Memory::Host) {
      copy_own(output, input.data[root], bytes);
    } else {
      requests.receive(output, bytes, root, tag);
      requests.send(input.data[root], bytes, root, tag);
    }
    for (int r = 0; r < w.comm.size(); ++r) {
      if (r != root) {
        requests.send(input.data[r], input.bytes[r], r, tag);
      }
    }
  }
  requests.wait();
}

} // namespace torch_mpi
