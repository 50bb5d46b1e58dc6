// What the files that show functions to Python share. Tensors come in as addresses: the typed wrappers in
// phalanx/kernels check shapes, types and strides, and keep the tensors alive for the length of the call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

namespace nb = nanobind;

namespace phalanx {

using Address = std::uintptr_t;

template <typename T>
T* at_address(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace phalanx
