// Small operations between the products.
#pragma once

#include <cstdint>

#include "cpu.hpp"

namespace phalanx {

enum class Type : int { f32 = 0, bf16 = 1 };

struct Pointwise {
  // One row of `width` numbers: x += delta (unless null), y = x / rms(x) * weight (unless null).
  void (*rms_norm_f32)(float* x, const float* delta, const float* weight, float* y, int width, float eps);
  void (*rms_norm_bf16)(std::uint16_t* x, const std::uint16_t* delta, const std::uint16_t* weight, std::uint16_t* y,
                        int width, float eps);
};

PHALANX_DECLARE_TABLES(Pointwise, pointwise)

}  // namespace phalanx
