// Who has come to a collective, and who has left for good: told through the group's store.
//
// MPI can say neither. The store is only used once a rank has waited for a second, so the fast path
// never sees it; and it is best effort: a store that does not answer means "not known".
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

namespace torch_mpi {

class PeerWatch {
 public:
  PeerWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // This rank has been waiting in step `what` (for instance "17", the 17th collective).
  void announce(const std::string& what);
  void withdraw(const std::string& what);
  // Ranks that have not announced `what`; nullopt when the store does not answer.
  std::optional<std::vector<int>> missing(const std::string& what);

  // This rank will take part in no further collective of the group.
  void depart(const std::string& why);
  // "rank 2 (it has exited)" of the first rank found to have left, or nullopt.
  std::optional<std::string> departed();

 private:
  std::string arrival_key(const std::string& what, int rank) const;

  c10::intrusive_ptr<c10d::Store> store_; // null: a group without a store
  int rank_;
  int size_;
  std::atomic<bool> gone_{false};
};

} // namespace torch_mpi
