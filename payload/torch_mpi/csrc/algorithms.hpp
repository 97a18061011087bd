// The collectives on plain memory. Nothing here knows tensors, threads or streams.
//
// Which MPI calls a collective makes depends on the operation, sizes, dtype and group alone, never
// on timing or on sync/async, because all ranks must make the same calls in the same order.
//
// Two ways to move much data:
//   direct  the members share a node: point-to-point exchange and our own reduction loops. It can
//           be interrupted (timeout) at any moment, sleeps instead of spinning, and needs no
//           temporary of the size of the tensor.
//   library several nodes: MPI's collectives, which know the network (hierarchy, offload), called
//           when all ranks have arrived.
// TORCH_MPI_ALGORITHM=direct|library overrides the choice for all groups of all ranks.
#pragma once

#include "datatypes.hpp"
#include "waiting.hpp"

#include <cstdint>
#include <vector>

namespace torch_mpi {

// Up to this many bytes an allreduce is latency: partners exchange whole vectors.
constexpr int64_t kSmallBytes = 16 * 1024;
// Large operations go through scratch in pieces of about this size.
constexpr int64_t kChunkBytes = 4 * 1024 * 1024;

// One block of memory for or from each rank.
struct Blocks {
  std::vector<char*> data;
  std::vector<int64_t> bytes;

  Blocks() = default;
  explicit Blocks(int n) : data(n, nullptr), bytes(n, 0) {}
  // n consecutive blocks of the same size.
  static Blocks even(void* base, int n, int64_t bytes_each);
};

// Whether memory of this kind can be read by the CPU; device memory goes to MPI as it is.
enum class Memory { Host, Device };

bool use_direct(const Communicator& comm);

// In place. Device memory needs !r.widened() and r.divisor == 1.
void allreduce(Waiter& w, void* data, int64_t count, const Reduction& r, Memory memory);

// Result in `data` of root; `data` of the others is left as it is.
void reduce(Waiter& w, void* data, int64_t count, const Reduction& r, int root, Memory memory);

// `input` has a block for each rank, `output` takes the reduced block of this rank.
void reduce_scatter(Waiter& w, void* output, const Blocks& input, const Reduction& r);
// The same with equal blocks one after another, by MPI alone: for device memory.
void reduce_scatter_library(
    Waiter& w, void* output, const void* input, int64_t count_each, const Reduction& r);

void broadcast(Waiter& w, void* data, int64_t bytes, int root);

// Every rank's `input` becomes block r of everyone's `output`. Blocks may differ in size.
void allgather(Waiter& w, const void* input, int64_t bytes, const Blocks& output, Memory memory);
// Equal blocks, one after another in `output`.
void allgather_even(
    Waiter& w, const void* input, int64_t bytes_each, void* output, Memory memory);

// Block p of `send` goes to rank p, block p of `recv` comes from rank p. Empty blocks send nothing.
void exchange(Waiter& w, const Blocks& send, const Blocks& recv, Memory memory);

void gather(Waiter& w, const void* input, int64_t bytes, const Blocks& output, int root, Memory m);
void scatter(Waiter& w, const Blocks& input, void* output, int64_t bytes, int root, Memory m);

void barrier(Waiter& w);

} // namespace torch_mpi
