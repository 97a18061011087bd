// Collectives that do arithmetic.
#include "algorithms.hpp"
#include "errors.hpp"
#include "kernels.hpp"
#include "requests.hpp"

#include <cstring>
#include <optional>

namespace torch_mpi {

namespace {

constexpr int kTagSmall = 2;
constexpr int kTagScatter = 3;
constexpr int kTagGather = 4;
constexpr int64_t kLeastBlock = 64 * 1024;

char* at(void* base, int64_t item, size_t item_bytes) {
  return static_cast<char*>(base) + item * static_cast<int64_t>(item_bytes);
}

// The largest int MPI takes as a count, as a multiple of a page.
constexpr int64_t kMostItems = (int64_t(1) << 31) - 4096;

// ---- small: recursive doubling on whole vectors in the accumulation type -----------------------

void swap_vectors(Waiter& w, const void* mine, void* theirs, int64_t bytes, int peer) {
  const int tag = w.comm.internal_tag(kTagSmall);
  MPI_Request pair[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  mpi_check(
      MPI_Irecv(theirs, static_cast<int>(bytes), MPI_BYTE, peer, tag, w.comm.get(), &pair[0]),
      "MPI_Irecv");
  mpi_check(
      MPI_Isend(mine, static_cast<int>(bytes), MPI_BYTE, peer, tag, w.comm.get(), &pair[1]),
      "MPI_Isend");
  w.wait_all(pair, 2);
}

// The result is in acc of all ranks, with the same bits everywhere. Both buffers belong to the
// communicator: they must outlive this call when it is given up.
void reduce_small(Waiter& w, char* acc, char* theirs, int64_t count, const Reduction& r) {
  const int n = w.comm.size();
  const int me = w.comm.rank();
  const int tag = w.comm.internal_tag(kTagSmall);
  const int64_t bytes = count * static_cast<int64_t>(r.acc_bytes());
  int power = 1;
  while (power * 2 <= n) {
    power *= 2;
  }
  // The first 2 * extra ranks work in pairs, so that a power of two is left.
  const int extra = n - power;
  const bool paired = me < 2 * extra;
  Requests requests(w);
  if (paired && me % 2 == 1) {
    requests.send(acc, bytes, me - 1, tag);
    requests.wait();
    requests.receive(acc, bytes, me - 1, tag);
    requests.wait();
    return;
  }
  if (paired) {
    requests.receive(theirs, bytes, me + 1, tag);
    requests.wait();
    combine(r, acc, acc, theirs, count);
  }
  const int virtual_rank = paired ? me / 2 : me - extra;
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = virtual_rank ^ distance;
    const int peer = partner < extra ? partner * 2 : partner + extra;
    swap_vectors(w, acc, theirs, bytes, peer);
    if (peer < me) {
      combine(r, acc, theirs, acc, count);
    } else {
      combine(r, acc, acc, theirs, count);
    }
  }
  if (paired) {
    requests.send(acc, bytes, me + 1, tag);
    requests.wait();
  }
}

void allreduce_small(Waiter& w, const void* input, void* output, int64_t count, const Reduction& r) {
  const auto bytes = count * static_cast<int64_t>(r.acc_bytes());
  char* acc = w.comm.scratch[0].at_least(2 * kSmallBytes * 2);
  char* theirs = acc + std::max<int64_t>(2 * kSmallBytes, bytes);
  widen(r, acc, input, count);
  reduce_small(w, acc, theirs, count, r);
  if (output != nullptr) {
    narrow(r, output, acc, count);
  }
}

// ---- direct: each rank reduces its share of a chunk, from everyone's memory ---------------------

// The share of rank p of a chunk.
struct Share {
  int64_t start;
  int64_t count;
};

Share share_of(int64_t chunk, int p, int n) {
  const int64_t start = chunk * p / n;
  return {start, chunk * (p + 1) / n - start};
}

int64_t chunk_items(int n, size_t item_bytes) {
  return std::max(kChunkBytes, kLeastBlock * n) / static_cast<int64_t>(item_bytes);
}

// One chunk on its way: shares travel to their owners, are reduced there, and the result goes to
// `targets` (everyone, or one rank).
class ChunkReduction {
 public:
  ChunkReduction(Waiter& w, const Reduction& r, char* scratch)
      : w_(w), r_(r), scratch_(scratch), scatter_(w), gather_(w) {}

  void start(char* data, int64_t count) {
    data_ = data;
    count_ = count;
    const int n = w_.comm.size();
    const int me = w_.comm.rank();
    const int tag = w_.comm.internal_tag(kTagScatter);
    const auto mine = share_of(count, me, n);
    const auto item = r_.item_bytes();
    for (int i = 1; i < n; ++i) {
      const int to = (me + i) % n;
      const int from = (me - i + n) % n;
      const auto theirs = share_of(count, to, n);
      scatter_.receive(slot(from), mine.count * item, from, tag);
      scatter_.send(at(data, theirs.start, item), theirs.count * item, to, tag);
    }
  }

  void finish_scatter() {
    scatter_.wait();
  }

  // Everyone gets everything.
  void share_with_all() {
    const int n = w_.comm.size();
    const int me = w_.comm.rank();
    const int tag = w_.comm.internal_tag(kTagGather);
    const auto item = r_.item_bytes();
    const auto mine = share_of(count_, me, n);
    char* own = at(data_, mine.start, item);
    reduce_into(own);
    for (int i = 1; i < n; ++i) {
      const int to = (me + i) % n;
      const int from = (me - i + n) % n;
      const auto theirs = share_of(count_, from, n);
      gather_.receive(at(data_, theirs.start, item), theirs.count * item, from, tag);
      gather_.send(own, mine.count * item, to, tag);
    }
  }

  // Only root gets it, and the others keep their data.
  void give_to(int root) {
    const int n = w_.comm.size();
    const int me = w_.comm.rank();
    const int tag = w_.comm.internal_tag(kTagGather);
    const auto item = r_.item_bytes();
    const auto mine = share_of(count_, me, n);
    if (me != root) {
      char* own = slot(me);
      reduce_into(own);
      gather_.send(own, mine.count * item, root, tag);
      return;
    }
    reduce_into(at(data_, mine.start, item));
    for (int r = 0; r < n; ++r) {
      const auto theirs = share_of(count_, r, n);
      if (r != root) {
        gather_.receive(at(data_, theirs.start, item), theirs.count * item, r, tag);
      }
    }
  }

  void finish_gather() {
    gather_.wait();
  }

  static int64_t scratch_bytes(int64_t chunk, int n, size_t item_bytes) {
    return (chunk / n + 1) * n * static_cast<int64_t>(item_bytes);
  }

 private:
  char* slot(int rank) const {
    return at(scratch_, rank * (chunk_items(w_.comm.size(), r_.item_bytes()) / w_.comm.size() + 1),
              r_.item_bytes());
  }

  void reduce_into(char* out) {
    const int n = w_.comm.size();
    const auto mine = share_of(count_, w_.comm.rank(), n);
    std::vector<const void*> sources(n);
    for (int p = 0; p < n; ++p) {
      sources[p] = p == w_.comm.rank() ? at(data_, mine.start, r_.item_bytes()) : slot(p);
    }
    reduce_many(r_, out, sources.data(), n, mine.count);
  }

  Waiter& w_;
  const Reduction& r_;
  char* scratch_;
  char* data_ = nullptr;
  int64_t count_ = 0;
  Requests scatter_;
  Requests gather_;
};

void reduce_direct(
    Waiter& w, void* data, int64_t count, const Reduction& r, std::optional<int> root) {
  const int n = w.comm.size();
  const int64_t chunk = chunk_items(n, r.item_bytes());
  const auto scratch_bytes = ChunkReduction::scratch_bytes(chunk, n, r.item_bytes());
  // While one chunk is reduced and shared, the next one is already on its way.
  ChunkReduction even(w, r, w.comm.scratch[1].at_least(scratch_bytes));
  ChunkReduction odd(w, r, w.comm.scratch[2].at_least(scratch_bytes));
  ChunkReduction* current = &even;
  ChunkReduction* next = &odd;
  current->start(static_cast<char*>(data), std::min(chunk, count));
  for (int64_t start = 0; start < count; start += chunk) {
    current->finish_scatter();
    const int64_t after = start + chunk;
    if (after < count) {
      next->finish_gather();
      next->start(at(data, after, r.item_bytes()), std::min(chunk, count - after));
    }
    root ? current->give_to(*root) : current->share_with_all();
    std::swap(current, next);
  }
  even.finish_gather();
  odd.finish_gather();
}

// ---- library: MPI's own reductions, half precision widened to float chunk by chunk --------------

void reduce_library(
    Waiter& w, void* data, int64_t count, const Reduction& r, std::optional<int> root, Memory m) {
  w.wait_for_arrival();
  const Waiter::Blocking blocking(w);
  const MPI_Datatype type = mpi_type(r.acc);
  const MPI_Op op = mpi_op(r.kind);
  const bool direct_buffer = !r.widened();
  // Open MPI allocates a temporary of the size of the call, so host memory goes in chunks; with
  // several nodes a chunk must still give each rank a decent share.
  const int64_t chunk = m == Memory::Device
      ? kMostItems
      : std::max<int64_t>(4 * kChunkBytes, kLeastBlock * w.comm.size()) / int64_t(r.acc_bytes());
  for (int64_t start = 0; start < count; start += chunk) {
    const auto items = static_cast<int>(std::min(chunk, count - start));
    char* piece = at(data, start, r.item_bytes());
    char* acc = piece;
    if (!direct_buffer) {
      acc = w.comm.scratch[1].at_least(chunk * r.acc_bytes());
      widen(r, acc, piece, items);
    }
    if (!root) {
      mpi_check(
          MPI_Allreduce(MPI_IN_PLACE, acc, items, type, op, w.comm.get()), "MPI_Allreduce");
    } else if (w.comm.rank() == *root) {
      mpi_check(
          MPI_Reduce(MPI_IN_PLACE, acc, items, type, op, *root, w.comm.get()), "MPI_Reduce");
    } else {
      mpi_check(MPI_Reduce(acc, nullptr, items, type, op, *root, w.comm.get()), "MPI_Reduce");
      continue;
    }
    if (m == Memory::Host) {
      narrow(r, piece, acc, items);
    }
  }
}

} // namespace

void allreduce(Waiter& w, void* data, int64_t count, const Reduction& r, Memory memory) {
  if (memory == Memory::Device) {
    reduce_library(w, data, count, r, std::nullopt, memory);
  } else if (count * static_cast<int64_t>(r.item_bytes()) <= kSmallBytes) {
    allreduce_small(w, data, data, count, r);
  } else if (use_direct(w.comm)) {
    reduce_direct(w, data, count, r, std::nullopt);
  } else {
    reduce_library(w, data, count, r, std::nullopt, memory);
  }
}

void reduce(Waiter& w, void* data, int64_t count, const Reduction& r, int root, Memory memory) {
  if (memory == Memory::Device) {
    reduce_library(w, data, count, r, root, memory);
  } else if (count * static_cast<int64_t>(r.item_bytes()) <= kSmallBytes) {
    allreduce_small(w, data, w.comm.rank() == root ? data : nullptr, count, r);
  } else if (use_direct(w.comm)) {
    reduce_direct(w, data, count, r, root);
  } else {
    reduce_library(w, data, count, r, root, memory);
  }
}

namespace {

void reduce_scatter_direct(Waiter& w, void* output, const Blocks& input, const Reduction& r) {
  const int n = w.comm.size();
  const int me = w.comm.rank();
  const int tag = w.comm.internal_tag(kTagScatter);
  const auto item = static_cast<int64_t>(r.item_bytes());
  const int64_t step = chunk_items(n, r.item_bytes()) / n * item;
  int64_t longest = 0;
  for (const auto bytes : input.bytes) {
    longest = std::max(longest, bytes);
  }
  char* buffers[2] = {w.comm.scratch[1].at_least(step * n), w.comm.scratch[2].at_least(step * n)};
  const auto part = [&](int rank, int64_t offset) {
    return std::clamp<int64_t>(input.bytes[rank] - offset, 0, step);
  };
  Requests first(w);
  Requests second(w);
  Requests* current = &first;
  Requests* next = &second;
  int which = 0;
  const auto start = [&](Requests& requests, int64_t offset, char* buffer) {
    for (int i = 1; i < n; ++i) {
      const int to = (me + i) % n;
      const int from = (me - i + n) % n;
      requests.receive(buffer + from * step, part(me, offset), from, tag);
      requests.send(input.data[to] + offset, part(to, offset), to, tag);
    }
  };
  start(*current, 0, buffers[which]);
  std::vector<const void*> sources(n);
  for (int64_t offset = 0; offset < longest; offset += step) {
    current->wait();
    if (offset + step < longest) {
      start(*next, offset + step, buffers[1 - which]);
    }
    const int64_t bytes = part(me, offset);
    for (int p = 0; p < n; ++p) {
      sources[p] = p == me ? input.data[me] + offset : buffers[which] + p * step;
    }
    reduce_many(r, static_cast<char*>(output) + offset, sources.data(), n, bytes / item);
    std::swap(current, next);
    which = 1 - which;
  }
}

// Equal blocks through MPI: a slice of each block is packed (and widened), reduced and unpacked.
void reduce_scatter_packed(Waiter& w, void* output, const Blocks& input, const Reduction& r) {
  const int n = w.comm.size();
  const auto item = r.item_bytes();
  const int64_t total = input.bytes[0] / static_cast<int64_t>(item);
  const int64_t slice = std::max<int64_t>(1, 4 * chunk_items(n, r.acc_bytes()) / n);
  char* packed = w.comm.scratch[1].at_least(slice * n * r.acc_bytes());
  char* mine = w.comm.scratch[2].at_least(slice * r.acc_bytes());
  w.wait_for_arrival();
  const Waiter::Blocking blocking(w);
  for (int64_t start = 0; start < total; start += slice) {
    const int64_t items = std::min(slice, total - start);
    for (int p = 0; p < n; ++p) {
      widen(r, at(packed, p * items, r.acc_bytes()), at(input.data[p], start, item), items);
    }
    mpi_check(
        MPI_Reduce_scatter_block(
            packed, mine, static_cast<int>(items), mpi_type(r.acc), mpi_op(r.kind), w.comm.get()),
        "MPI_Reduce_scatter_block");
    narrow(r, at(output, start, item), mine, items);
  }
}

} // namespace

void reduce_scatter(Waiter& w, void* output, const Blocks& input, const Reduction& r) {
  bool even = true;
  for (const auto bytes : input.bytes) {
    even = even && bytes == input.bytes[0];
  }
  if (even && input.bytes[0] * w.comm.size() > kSmallBytes && !use_direct(w.comm)) {
    reduce_scatter_packed(w, output, input, r);
  } else {
    reduce_scatter_direct(w, output, input, r);
  }
}

void reduce_scatter_library(
    Waiter& w, void* output, const void* input, int64_t count_each, const Reduction& r) {
  TORCH_CHECK_WITH(
      DistBackendError, count_each <= kMostItems,
      "mpi: reduce_scatter of device memory takes up to ", kMostItems, " items a rank, got ",
      count_each);
  w.wait_for_arrival();
  const Waiter::Blocking blocking(w);
  mpi_check(
      MPI_Reduce_scatter_block(
          input, output, static_cast<int>(count_each), mpi_type(r.acc), mpi_op(r.kind),
          w.comm.get()),
      "MPI_Reduce_scatter_block");
}

} // namespace torch_mpi
