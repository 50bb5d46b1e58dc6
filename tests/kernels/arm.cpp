// What the kernels have for Arm alone, against plain arithmetic and the kernels without dot products, to the bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "attention.hpp"
#include "block_matmul.hpp"
#include "matmul.hpp"

using namespace phalanx;

namespace {

std::mt19937 random_bits(7);
int below(int n) { return static_cast<int>(random_bits() % n); }
float number() { return below(2001) / 1000.0f - 1.0f; }

void expect(bool good, const char* what, int kind, int rows) {
  if (good) return;
  std::printf("%s, kind %d, %d rows: not the same\n", what, kind, rows);
  std::exit(1);
}

float widened(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void* aligned(std::size_t bytes) { return std::aligned_alloc(64, (bytes + 127) / 64 * 64); }

// One sum for each output, by fused multiply and add along the inputs.
void check_matmul(const Matmul& kernels) {
  const int depth = 37;
  for (int width : {32, 5}) {
    for (int rows = 1; rows <= kernels.tile_rows; ++rows) {
      std::vector<float> x(rows * depth), w(width * depth), sums(rows * 32), tile(rows * depth);
      std::vector<std::uint16_t> narrow_x(rows * depth), narrow_w(width * depth);
      for (auto& each : x) each = number();
      for (auto& each : w) each = number();
      for (auto& each : narrow_x) each = static_cast<std::uint16_t>(0x3e00 + below(512));
      for (auto& each : narrow_w) each = static_cast<std::uint16_t>(0xbe00 + below(512));
      kernels.tile_f32(x.data(), depth, rows, depth, tile.data());
      kernels.multiply_f32(w.data(), width, tile.data(), rows, depth, sums.data(), false, {nullptr, 0});
      for (int r = 0; r < rows; ++r)
        for (int o = 0; o < width; ++o) {
          float sum = 0.0f;
          for (int k = 0; k < depth; ++k) sum = std::fma(w[k * width + o], x[r * depth + k], sum);
          expect(sums[r * 32 + o] == sum, "float32 products", width, rows);
        }
      kernels.tile_bf16(narrow_x.data(), depth, rows, depth, tile.data());
      kernels.multiply_bf16(narrow_w.data(), width, tile.data(), rows, depth, sums.data(), false, {nullptr, 0});
      for (int r = 0; r < rows; ++r)
        for (int o = 0; o < width; ++o) {
          float sum = 0.0f;
          for (int k = 0; k < depth; ++k) {
            const bool last = k + 1 == depth;  // pairs of neighbours, and an odd one behind them
            const std::uint16_t weight = narrow_w[last ? k * width + o : (k / 2 * width + o) * 2 + k % 2];
            sum = std::fma(widened(weight), widened(narrow_x[r * depth + k]), sum);
          }
          expect(sums[r * 32 + o] == sum, "bfloat16 products", width, rows);
        }
    }
  }
}

void check_blocks() {
  const std::size_t blocks = 9;
  const int outputs = 37, groups = 3;
  for (int kind = 0; kind < static_cast<int>(BlockKind::count); ++kind) {
    const BlockLayout& layout = kBlockLayouts[kind];
    const GroupShape shape(layout, blocks, 0, layout.super_bytes ? 3 : 0);
    char* packed = static_cast<char*>(aligned(groups * shape.bytes));
    for (int g = 0; g < groups; ++g) {
      char* group = packed + g * shape.bytes;
      for (std::size_t i = 0; i < shape.bytes; ++i) group[i] = static_cast<char>(below(256));
      // Scales that are numbers: float16 (or float32 for whole outputs and INT4) of moderate size.
      auto halves = [&](std::size_t from, std::size_t to) {
        for (std::size_t i = from; i + 1 < to; i += 2) group[i + 1] = static_cast<char>(0x24 + below(8));
      };
      auto floats = [&](std::size_t at) {
        for (int i = 0; i < 16; ++i) {
          const float value = number();
          std::memcpy(group + at + 4 * i, &value, 4);
        }
      };
      if (layout.tail_bytes) floats(shape.tail);
      if (layout.super_bytes == 80)
        for (std::size_t at = shape.supers; at < shape.tail; at += 80) floats(at);
      else
        halves(layout.super_bytes ? shape.supers : shape.scales, layout.super_bytes ? shape.tail : shape.supers);
    }
    for (int rows = 1; rows <= 7; ++rows) {
      std::vector<std::int8_t> q(rows * blocks * kBlock);
      std::vector<float> scale(rows * blocks), scaled(rows * blocks), y(rows * outputs), z(rows * outputs);
      std::vector<std::int32_t> offset(2 * rows * blocks);
      for (auto& each : q) each = static_cast<std::int8_t>(below(255) - 127);
      for (std::size_t b = 0; b < rows * blocks; ++b) {
        int half[2] = {};
        for (int i = 0; i < kBlock; ++i) half[i / 16] += q[b * kBlock + i];
        scale[b] = number();
        scaled[b] = scale[b] * static_cast<float>(half[0] + half[1]);
        for (int h = 0; h < 2; ++h) offset[2 * b + h] = -8 * half[h];
      }
      const BlockPart part{reinterpret_cast<std::int64_t>(packed), kind, outputs, 0, 0, layout.super_bytes ? 3 : 0};
      BlockProduct product{{q.data(), scale.data(), scaled.data(), offset.data(), blocks}, y.data(), outputs,
                           Number::f32, nullptr, Number::f32};
      generic::block_matmul.multiply(product, part, 0, groups, 0, rows, {});
      product.y = z.data();
      dotprod::block_matmul.multiply(product, part, 0, groups, 0, rows, {});
      float most = 0.0f;
      for (float each : y) most = std::fmax(most, std::fabs(each));
      expect(most > 0.0f && most < 1e9f, "nothing to compare", kind, rows);
      expect(std::memcmp(y.data(), z.data(), 4 * y.size()) == 0, "products of blocks", kind, rows);
    }
    std::free(packed);
  }
}

// A head of float32 queries at the end of a context, against a softmax in double.
void check_attention(const Attention& kernels) {
  const int dim = 64, tokens = 80, block_size = 16, start[] = {0, 1}, order[] = {0};
  std::vector<float> qkv(tokens * 3 * dim), out(tokens * dim);
  for (auto& each : qkv) each = 3.0f * number();
  std::vector<std::int64_t> slots(tokens);
  std::vector<std::int32_t> table(tokens / block_size);
  for (int i = 0; i < tokens; ++i) slots[i] = i;
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int>(i);
  const std::size_t room = 4 * tokens * dim;
  AttentionCall call{};
  call.heads = call.kv_heads = 1;
  call.dim = dim;
  call.group_start = start;
  call.head_order = order;
  call.scale = 0.125f;
  call.query = qkv.data();
  call.key = qkv.data() + dim;
  call.value = qkv.data() + 2 * dim;
  call.query_pitch = call.key_pitch = 3 * dim;
  call.cache_type = CacheType::f32;
  call.tiled = 1;
  call.key_cache = static_cast<char*>(aligned(room));
  call.value_cache = static_cast<char*>(aligned(room));
  call.block_size = block_size;
  call.slots = slots.data();
  call.tables = table.data();
  call.table_width = static_cast<int>(table.size());
  call.out = out.data();
  char* scratch = static_cast<char*>(aligned(kernels.scratch_bytes(tokens, dim)));
  kernels.write(call, 0, tokens, 0, 1, scratch);
  const AttentionTask task{0, 0, 0, tokens, 0, 0, 1, 0, -1};
  kernels.attend(call, task, nullptr, nullptr, scratch);
  for (int t = 0; t < tokens; ++t) {
    std::vector<double> weight(t + 1);
    double total = 0.0;
    for (int s = 0; s <= t; ++s) {
      double score = 0.0;
      for (int d = 0; d < dim; ++d) score += double{qkv[t * 3 * dim + d]} * qkv[s * 3 * dim + dim + d];
      total += weight[s] = std::exp(score * call.scale);
    }
    for (int d = 0; d < dim; ++d) {
      double wanted = 0.0;
      for (int s = 0; s <= t; ++s) wanted += weight[s] / total * qkv[s * 3 * dim + 2 * dim + d];
      expect(std::fabs(out[t * dim + d] - wanted) < 1e-4, "attention", t, d);
    }
  }
}

}  // namespace

int main() {
  check_matmul(generic::matmul);
  check_matmul(dotprod::matmul);
  check_attention(generic::attention);
  check_attention(dotprod::attention);
  check_blocks();
  if (available().size() != 2) return std::puts("the processor is said to have no dot products"), 1;
  return std::puts("all the same"), 0;
}
