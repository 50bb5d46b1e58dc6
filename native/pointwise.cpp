#include "pointwise.hpp"

#include "calls.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

// A task is so long that handing it to another thread is worth while.
constexpr std::size_t kNumbersPerTask = 8192;

// fn(first, last) over parts of `rows` rows of `width` numbers.
template <typename F>
void share_rows(std::size_t rows, std::size_t width, F&& fn) {
  const std::size_t each = width < kNumbersPerTask ? kNumbersPerTask / (width ? width : 1) : 1;
  parallel_for((rows + each - 1) / each, [&](std::size_t task) {
    const std::size_t first = task * each;
    fn(first, first + each < rows ? first + each : rows);
  });
}

constexpr std::size_t size_of(int type) { return static_cast<Type>(type) == Type::bf16 ? 2 : 4; }

}  // namespace

void norm(Address x, Address delta, Address weight, Address bias, Address y, std::size_t rows, int width, float eps,
          int layer, int types, RoundedRows* rounded) {
  const NormRow row_norm = pointwise().norm[layer][types];
  const std::size_t bytes = width * (types == 0 ? 4 : 2);
  share_rows(rows, width, [&](std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row)
      row_norm(at_address<char>(x) + row * bytes, delta ? at_address<char>(delta) + row * bytes : nullptr,
               at_address<char>(weight), at_address<char>(bias), at_address<char>(y) + row * bytes, width, eps);
    if (rounded != nullptr) rounded->round(at_address<void>(y), width, first, last);
  });
}

void activate(Address x, Address y, std::size_t rows, std::size_t width, int function, int type,
              RoundedRows* rounded) {
  const ActivateRow row_activate = pointwise().activate[function][type];
  const std::size_t bytes = width * size_of(type);
  share_rows(rows, width, [&](std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row)
      row_activate(at_address<char>(x) + row * bytes, nullptr, at_address<char>(y) + row * bytes, width);
    if (rounded != nullptr) rounded->round(at_address<void>(y), width, first, last);
  });
}

void activate_gated(Address x, Address y, std::size_t rows, std::size_t width, int function, int type,
              RoundedRows* rounded) {
  const ActivateRow row_activate = pointwise().activate[function][type];
  const std::size_t bytes = width * size_of(type);
  share_rows(rows, width, [&](std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row) {
      const char* gate = at_address<char>(x) + row * 2 * bytes;
      row_activate(gate, gate + bytes, at_address<char>(y) + row * bytes, width);
    }
    if (rounded != nullptr) rounded->round(at_address<void>(y), width, first, last);
  });
}

void add_up(const Address* pieces, int count, Address y, std::size_t rows, std::size_t width, int type) {
  const SumRow sum = pointwise().sum[type];
  const std::size_t bytes = width * size_of(type);
  share_rows(rows, width, [&](std::size_t first, std::size_t last) {
    sum(pieces, count, first * width, at_address<char>(y) + first * bytes, (last - first) * width);
  });
}

void add_bias(Address y, Address bias, std::size_t rows, std::size_t width, int type) {
  const SumRow sum = pointwise().sum[type];
  const std::size_t bytes = width * size_of(type);
  share_rows(rows, width, [&](std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row) {
      const Address both[2] = {y + row * bytes, bias};
      sum(both, 2, 0, at_address<void>(both[0]), width);
    }
  });
}

namespace {

void turns(Address positions, Address inverse, Address factors, Address classes, Address cos, Address sin,
           std::size_t tokens, int half, int type) {
  const TurnRow turn = pointwise().turn[type];
  const std::size_t bytes = 2 * half * size_of(type);
  share_rows(tokens, 16 * half, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const std::int64_t kind = classes ? at_address<std::int64_t>(classes)[i] : 0;
      turn(static_cast<float>(at_address<std::int64_t>(positions)[i]), at_address<float>(inverse) + kind * half,
           at_address<float>(factors)[kind], at_address<char>(cos) + i * bytes, at_address<char>(sin) + i * bytes,
           half);
    }
  });
}

}  // namespace

void bind_pointwise(nb::module_& m) {
  m.def("norm", [](Address x, Address delta, Address weight, Address bias, Address y, std::size_t rows, int width,
                  float eps, int layer, int types) { norm(x, delta, weight, bias, y, rows, width, eps, layer, types); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("activate", [](Address x, Address y, std::size_t rows, std::size_t width, int function, int type) {
    activate(x, y, rows, width, function, type);
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("activate_gated", [](Address x, Address y, std::size_t rows, std::size_t width, int function, int type) {
    activate_gated(x, y, rows, width, function, type);
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("turns", &turns, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace phalanx
