// Every MPI return code goes through mpi_check: with MPI_ERRORS_RETURN set on our communicators a
// failed call becomes a Python exception that carries MPI's own words.
#pragma once

#include <mpi.h>

#include <c10/util/Exception.h>

#include <string>

namespace torch_mpi {

inline std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {0};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(text, length);
}

[[noreturn]] inline void raise_backend_error(const std::string& message) {
  TORCH_CHECK_WITH(DistBackendError, false, message);
  __builtin_unreachable();
}

inline void mpi_check(int code, const char* call) {
  if (C10_UNLIKELY(code != MPI_SUCCESS)) {
    raise_backend_error(c10::str(call, " failed: ", mpi_error_text(code), " (MPI error ", code, ")"));
  }
}

} // namespace torch_mpi
