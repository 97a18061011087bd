#include "peer_watch.hpp"

namespace torch_mpi {

namespace {

std::vector<uint8_t> bytes(const std::string& text) {
  return std::vector<uint8_t>(text.begin(), text.end());
}

} // namespace

PeerWatch::PeerWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : rank_(rank), size_(size) {
  if (store) {
    store_ = c10::make_intrusive<c10d::PrefixStore>("torch_mpi", std::move(store));
  }
}

std::string PeerWatch::arrival_key(const std::string& what, int rank) const {
  return c10::str("arrived/", what, "/", rank);
}

void PeerWatch::announce(const std::string& what) {
  if (!store_) {
    return;
  }
  try {
    store_->set(arrival_key(what, rank_), bytes("1"));
  } catch (const std::exception&) {
  }
}

void PeerWatch::withdraw(const std::string& what) {
  if (!store_) {
    return;
  }
  try {
    store_->deleteKey(arrival_key(what, rank_));
  } catch (const std::exception&) {
  }
}

std::optional<std::vector<int>> PeerWatch::missing(const std::string& what) {
  if (!store_) {
    return std::nullopt;
  }
  std::vector<int> ranks;
  try {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && !store_->check({arrival_key(what, r)})) {
        ranks.push_back(r);
      }
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return ranks;
}

void PeerWatch::depart(const std::string& why) {
  if (!store_ || gone_.exchange(true)) {
    return;
  }
  try {
    store_->set(c10::str("left/", rank_), bytes(why));
    store_->set("left", bytes("1"));
  } catch (const std::exception&) {
  }
}

std::optional<std::string> PeerWatch::departed() {
  if (!store_) {
    return std::nullopt;
  }
  try {
    if (!store_->check({"left"})) {
      return std::nullopt;
    }
    for (int r = 0; r < size_; ++r) {
      const auto key = c10::str("left/", r);
      if (r != rank_ && store_->check({key})) {
        const auto why = store_->get(key);
        return c10::str("rank ", r, " (it ", std::string(why.begin(), why.end()), ")");
      }
    }
  } catch (const std::exception&) {
  }
  return std::nullopt;
}

} // namespace torch_mpi
