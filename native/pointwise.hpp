// Small operations between the products: norms with their residual, activations, rotary angles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace phalanx {

enum class Type : int { f32 = 0, bf16 = 1 };

// One row of `width` numbers: x += delta (unless null), y = norm(x) * weight + bias (unless null). y may be x.
using NormRow = void (*)(void* x, const void* delta, const void* weight, const void* bias, void* y, int width,
                         float eps);
// y = f(x), times `factor` unless null.
using ActivateRow = void (*)(const void* x, const void* factor, void* y, std::size_t count);
// For one position: cos and sin of position * inverse[i], times factor, i < half. Both of `cos`'s halves are the same;
// the first half of `sin` has its sign turned.
using TurnRow = void (*)(float position, const float* inverse, float factor, void* cos, void* sin, int half);
// y[i] = the sum of pieces[0][from + i], pieces[1][from + i] …, in this order, rounded once. y may be a piece, from 0.
using SumRow = void (*)(const std::uintptr_t* pieces, int count, std::size_t from, void* y, std::size_t numbers);

struct Pointwise {
  NormRow norm[2][3];         // [RMS, layer norm][all float32, all bfloat16, bfloat16 with float32 weight and bias]
  ActivateRow activate[4][2]; // [silu, gelu, gelu by tanh, relu][Type]
  TurnRow turn[2];            // [Type]
  SumRow sum[2];              // [Type]
};

PHALANX_DECLARE_TABLES(Pointwise, pointwise)

}  // namespace phalanx
