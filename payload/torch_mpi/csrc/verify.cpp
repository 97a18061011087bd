#include "verify.hpp"

#include "algorithms.hpp"
#include "errors.hpp"

#include <cstring>
#include <map>

namespace torch_mpi {

namespace {

constexpr size_t kLength = 512; // of one rank's description, zero-terminated
constexpr size_t kMostTensors = 8;

} // namespace

std::string describe_tensor(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

std::string describe_tensors(const std::vector<at::Tensor>& tensors) {
  std::string text = c10::str(tensors.size(), " tensors (");
  for (size_t i = 0; i < std::min(tensors.size(), kMostTensors); ++i) {
    text += (i ? ", " : "") + describe_tensor(tensors[i]);
  }
  // All of them count in the comparison, though not all are spelled out.
  uint64_t hash = 1469598103934665603ull;
  for (const auto& t : tensors) {
    for (const char c : describe_tensor(t)) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    }
  }
  return text + (tensors.size() > kMostTensors ? c10::str(", … #", hash) : "") + ")";
}

std::string describe_call(const char* name, const std::string& arguments) {
  std::string text = c10::str(name, "(", arguments, ")");
  if (text.size() >= kLength) {
    text.resize(kLength - 1);
  }
  return text;
}

void verify_same_call(Waiter& w, const std::string& what) {
  const int n = w.comm.size();
  const int me = w.comm.rank();
  char* all = w.comm.scratch[1].at_least(kLength * n);
  char* mine = all + me * kLength;
  std::memset(mine, 0, kLength);
  std::memcpy(mine, what.data(), what.size());
  allgather_even(w, mine, kLength, all, Memory::Host);
  std::map<std::string, std::vector<int>> calls;
  for (int r = 0; r < n; ++r) {
    calls[std::string(all + r * kLength)].push_back(r);
  }
  if (calls.size() == 1) {
    return;
  }
  std::string text = "the ranks do not call the same operation:";
  for (const auto& [call, ranks] : calls) {
    text += c10::str("\n  ranks ", list_ranks(ranks), ": ", call);
  }
  throw Refused(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, w.describe() + ": " + text);
}

} // namespace torch_mpi
