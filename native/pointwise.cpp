#include "pointwise.hpp"

#include "bindings.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

constexpr std::size_t kRowsPerTask = 8;

template <typename T>
void norm_rows(void (*norm)(T*, const T*, const T*, T*, int, float), Address x, Address delta, Address weight,
               Address y, std::size_t rows, int width, float eps) {
  parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
    const std::size_t end = task * kRowsPerTask + kRowsPerTask < rows ? task * kRowsPerTask + kRowsPerTask : rows;
    for (std::size_t row = task * kRowsPerTask; row < end; ++row) {
      const std::size_t at = row * width;
      norm(at_address<T>(x) + at, delta ? at_address<T>(delta) + at : nullptr, at_address<T>(weight),
           at_address<T>(y) + at, width, eps);
    }
  });
}

void rms_norm(Address x, Address delta, Address weight, Address y, std::size_t rows, int width, float eps, int type) {
  if (static_cast<Type>(type) == Type::bf16)
    norm_rows<std::uint16_t>(pointwise().rms_norm_bf16, x, delta, weight, y, rows, width, eps);
  else
    norm_rows<float>(pointwise().rms_norm_f32, x, delta, weight, y, rows, width, eps);
}

}  // namespace

void bind_pointwise(nb::module_& m) {
  m.def("rms_norm", &rms_norm, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace phalanx
