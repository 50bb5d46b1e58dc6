#include "matmul.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "calls.hpp"
#include "pointwise.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

constexpr std::size_t kTilesPerChunk = 8;    // rows that share a pass over the weights
constexpr std::size_t kTasksPerThread = 4;
constexpr int kDepthBytes = 4096;            // of an output's weights in one pass: a block of them stays in the cache
constexpr int kAhead = 8192;                 // bytes: what arrives while one has to be waited for
constexpr std::size_t kRowsPerTask = 8;      // of looked up rows

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Memory of the calling thread that grows as needed, for x in tiles.
void* scratch(std::size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    size = ceil_div(bytes, 4096) * 4096;
    memory.reset();
    memory.reset(std::aligned_alloc(64, size));
    if (!memory) {
      size = 0;
      throw std::bad_alloc();
    }
  }
  return memory.get();
}

// The first tile of a pass over weights reads them from far away, so it fetches what it needs next; the second, or the
// second and the third, what the next pass needs, which lies behind.
Fetch fetch(const void* weights, int line, std::size_t bytes, std::size_t tile, std::size_t tiles) {
  const char* at = static_cast<const char*>(weights);
  if (tile == 0) return {at + kAhead, line};
  if (tiles == 2) return {at + bytes, line};
  if (tile > 2) return {at, 0};
  return {at + bytes + (tile - 1) * (bytes / 2), line / 2};
}

// What differs by type.
struct Kernels {
  const Matmul& table = matmul();
  void tile(const float* x, std::size_t stride, int rows, int depth, void* to) const {
    table.tile_f32(x, stride, rows, depth, to);
  }
  void tile(const std::uint16_t* x, std::size_t stride, int rows, int depth, void* to) const {
    table.tile_bf16(x, stride, rows, depth, to);
  }
  void multiply(const float* w, int width, const void* x, int rows, int depth, float* sums, bool carry,
                Fetch fetch) const {
    table.multiply_f32(w, width, x, rows, depth, sums, carry, fetch);
  }
  void multiply(const std::uint16_t* w, int width, const void* x, int rows, int depth, float* sums, bool carry,
                Fetch fetch) const {
    table.multiply_bf16(w, width, x, rows, depth, sums, carry, fetch);
  }
  void finish(const float* sums, int rows, int width, const float* bias, float* y, std::size_t stride) const {
    table.finish_f32(sums, rows, width, bias, y, stride);
  }
  void finish(const float* s, int rows, int width, const std::uint16_t* bias, std::uint16_t* y, std::size_t n) const {
    table.finish_bf16(s, rows, width, bias, y, n);
  }
  void finish(const float* sums, int rows, int width, const std::uint16_t* bias, float* y, std::size_t stride) const {
    table.finish_wide(sums, rows, width, bias, y, stride);
  }
};

template <typename T, typename Y>
void product(const T* x, std::size_t x_stride, const T* w, const T* bias, Y* y, std::size_t y_stride,
             std::size_t rows, int depth, int outputs) {
  if (rows == 0 || outputs == 0) return;
  const Kernels kernels;
  const bool pairs = sizeof(T) == 2 && kernels.table.multiplies_pairs;
  const std::size_t words = pairs ? ceil_div(depth, 2) : depth;  // of a row in a tile
  const std::size_t tiles = ceil_div(rows, kernels.table.tile_rows), blocks = ceil_div(outputs, kBlockOutputs);
  auto first_row = [&](std::size_t tile) { return rows * tile / tiles; };

  const std::uint32_t* x_tiles;
  if (rows == 1 && (sizeof(T) == 4 || (pairs && depth % 2 == 0))) {
    x_tiles = reinterpret_cast<const std::uint32_t*>(x);  // a tile already
  } else {
    std::uint32_t* made = static_cast<std::uint32_t*>(scratch(rows * words * 4));
    auto make = [&](std::size_t tile) {
      const std::size_t from = first_row(tile);
      kernels.tile(x + from * x_stride, x_stride, static_cast<int>(first_row(tile + 1) - from), depth,
                   made + from * words);
    };
    if (tiles == 1)
      make(0);
    else
      parallel_for(tiles, make);
    x_tiles = made;
  }

  const int pass = kDepthBytes / static_cast<int>(sizeof(T));
  const std::size_t chunks = ceil_div(tiles, kTilesPerChunk);
  const std::size_t threads = team_size();
  std::size_t ranges = threads == 1 ? 1 : ceil_div(threads * kTasksPerThread, chunks);
  if (ranges > blocks) ranges = blocks;
  parallel_for(chunks * ranges, [&](std::size_t task) {
    const std::size_t chunk = task / ranges, range = task % ranges;
    const std::size_t first_tile = tiles * chunk / chunks, end_tile = tiles * (chunk + 1) / chunks;
    const std::size_t first = first_row(first_tile);
    alignas(64) float sums[kTilesPerChunk * 16 * kBlockOutputs];
    for (std::size_t b = blocks * range / ranges; b < blocks * (range + 1) / ranges; ++b) {
      const std::size_t at = b * kBlockOutputs;
      const int left = outputs - static_cast<int>(at), width = left < kBlockOutputs ? left : kBlockOutputs;
      const T* block = w + at * depth;
      for (int k = 0; k == 0 || k < depth; k += pass) {
        const int steps = depth - k < pass ? depth - k : pass;
        const T* weights = block + static_cast<std::size_t>(k) * width;
        for (std::size_t tile = first_tile; tile < end_tile; ++tile) {
          const std::size_t from = first_row(tile), count = first_row(tile + 1) - from;
          kernels.multiply(weights, width, x_tiles + from * words + count * (pairs ? k / 2 : k),
                           static_cast<int>(count), steps, sums + (from - first) * kBlockOutputs, k > 0,
                           fetch(weights, 4 * width, static_cast<std::size_t>(steps) * width * sizeof(T),
                                 tile - first_tile, end_tile - first_tile));
        }
      }
      kernels.finish(sums, static_cast<int>(first_row(end_tile) - first), width, bias == nullptr ? nullptr : bias + at,
                     y + first * y_stride + at, y_stride);
    }
  });
}

}  // namespace

void multiply_packed(Address x, std::size_t x_stride, Address w, Address bias, Address y, std::size_t y_stride,
                     std::size_t rows, int depth, int outputs, int type, bool wide) {
  using Half = std::uint16_t;
  if (static_cast<Type>(type) == Type::f32)
    product(at_address<float>(x), x_stride, at_address<float>(w), at_address<float>(bias), at_address<float>(y),
            y_stride, rows, depth, outputs);
  else if (wide)
    product(at_address<Half>(x), x_stride, at_address<Half>(w), at_address<Half>(bias), at_address<float>(y), y_stride,
            rows, depth, outputs);
  else
    product(at_address<Half>(x), x_stride, at_address<Half>(w), at_address<Half>(bias), at_address<Half>(y), y_stride,
            rows, depth, outputs);
}

namespace {

// From or to rows: the block of output n, its width, and n's place in it.
template <typename T>
struct Place {
  T* block;
  std::size_t width, lane;
  Place(T* packed, std::size_t n, std::size_t outputs, std::size_t depth)
      : block(packed + n / kBlockOutputs * kBlockOutputs * depth),
        width(outputs - n / kBlockOutputs * kBlockOutputs),
        lane(n % kBlockOutputs) {
    if (width > kBlockOutputs) width = kBlockOutputs;
  }
};

template <typename T>
void pack_block(const T* plain, std::size_t stride, T* packed, std::size_t first, std::size_t depth,
                std::size_t outputs) {
  const Place<T> place(packed, first, outputs, depth);
  const T* rows = plain + first * stride;
  T* to = place.block;
  constexpr std::size_t together = 4 / sizeof(T);
  std::size_t k = 0;
  for (; k + together <= depth; k += together)
    for (std::size_t lane = 0; lane < place.width; ++lane, to += together)
      std::memcpy(to, rows + lane * stride + k, 4);
  for (; k < depth; ++k)
    for (std::size_t lane = 0; lane < place.width; ++lane) *to++ = rows[lane * stride + k];
}

template <typename T>
void copy_row(const T* packed, std::size_t n, std::size_t depth, std::size_t outputs, T* to) {
  const Place<const T> place(packed, n, outputs, depth);
  constexpr std::size_t together = 4 / sizeof(T);
  const T* from = place.block + place.lane * together;
  std::size_t k = 0;
  for (; k + together <= depth; k += together) std::memcpy(to + k, from + k * place.width, 4);
  if (k < depth) to[k] = place.block[k * place.width + place.lane];
}

void pack(Address plain, std::size_t stride, Address packed, std::size_t outputs, std::size_t depth, int type) {
  parallel_for(ceil_div(outputs, kBlockOutputs), [&](std::size_t block) {
    if (static_cast<Type>(type) == Type::f32)
      pack_block(at_address<float>(plain), stride, at_address<float>(packed), block * kBlockOutputs, depth, outputs);
    else
      pack_block(at_address<std::uint16_t>(plain), stride, at_address<std::uint16_t>(packed), block * kBlockOutputs,
                 depth, outputs);
  });
}

// Rows ids[i] - start of a packed matrix, zeros for those that it does not have.
template <typename T>
void copy_rows(const T* packed, const std::int64_t* ids, std::int64_t start, T* y, std::size_t count,
                  std::size_t outputs, std::size_t depth) {
  parallel_for(ceil_div(count, kRowsPerTask), [&](std::size_t task) {
    const std::size_t end = (task + 1) * kRowsPerTask < count ? (task + 1) * kRowsPerTask : count;
    for (std::size_t i = task * kRowsPerTask; i < end; ++i) {
      const std::int64_t n = ids[i] - start;
      if (n >= 0 && n < static_cast<std::int64_t>(outputs))
        copy_row(packed, n, depth, outputs, y + i * depth);
      else
        std::memset(y + i * depth, 0, depth * sizeof(T));
    }
  });
}

}  // namespace

void look_up_packed_rows(Address packed, Address ids, std::int64_t start, Address y, std::size_t count,
                         std::size_t outputs, std::size_t depth, int type) {
  if (static_cast<Type>(type) == Type::f32)
    copy_rows(at_address<float>(packed), at_address<std::int64_t>(ids), start, at_address<float>(y), count, outputs,
                 depth);
  else
    copy_rows(at_address<std::uint16_t>(packed), at_address<std::int64_t>(ids), start,
                 at_address<std::uint16_t>(y), count, outputs, depth);
}

void bind_matmul(nb::module_& m) {
  m.def("matmul", &multiply_packed, nb::call_guard<nb::gil_scoped_release>());
  m.def("pack_matrix", &pack, nb::call_guard<nb::gil_scoped_release>());
  m.def("packed_rows", &look_up_packed_rows, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace phalanx
