#include "amx.hpp"

#include "block_matmul.hpp"

#if defined(PHALANX_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <vector>
#endif

namespace phalanx {

#if defined(PHALANX_AMX)

namespace {

bool processor_has_it() {
  unsigned a, b, c, d;
  constexpr unsigned kTilesAndInt8 = 3u << 24;
  return __builtin_cpu_supports("avx512bf16") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
         (d & kTilesAndInt8) == kTilesAndInt8;
}

// It saves the tiles of a thread, and lets this process's threads have some.
bool system_allows_it() {
#if defined(__linux__)
  constexpr unsigned kTileState = 3u << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const char* find_refusal() {
  __builtin_cpu_init();
  if (!processor_has_it()) return "the processor has none";
  if (!system_allows_it()) return "the operating system does not allow it";
  if (!amx_agrees()) return "its results here are not those of AVX-512";
  return "";
}

}  // namespace

bool amx_agrees() {
  constexpr std::size_t blocks = 3, rows = 16, outputs = 32, groups = outputs / kLanes;
  std::uint32_t state = 1;
  const auto random = [&](int below) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((state >> 8) % below);
  };
  std::vector<std::int8_t> q(rows * blocks * kBlock);
  std::vector<float> scale(rows * blocks), scaled_sum(rows * blocks), expected(rows * outputs), found(rows * outputs);
  std::vector<std::int32_t> offset(rows * blocks * 2);
  for (std::int8_t& each : q) each = static_cast<std::int8_t>(random(255) - 127);
  for (std::size_t i = 0; i < q.size(); ++i) offset[i / 16] -= 8 * q[i];
  for (std::size_t i = 0; i < scale.size(); ++i) {
    scale[i] = static_cast<float>(random(1000) - 500);
    scaled_sum[i] = scale[i] * static_cast<float>((offset[2 * i] + offset[2 * i + 1]) / -8);
  }
  for (int kind = 0; kind < static_cast<int>(BlockKind::count); ++kind) {
    const BlockLayout& layout = kBlockLayouts[kind];
    const GroupShape shape(layout, blocks, 0, 3);
    std::vector<std::uint8_t> packed(groups * shape.bytes);
    for (std::size_t i = 0; i < packed.size(); ++i)  // all integers; as scales, in any type, small numbers
      packed[i] = static_cast<std::uint8_t>(i % shape.bytes < shape.scales ? random(256) : 0x24 + random(8));
    const BlockPart part{reinterpret_cast<std::int64_t>(packed.data()), kind, outputs, 0, 0, 3};
    BlockProduct product{{q.data(), scale.data(), scaled_sum.data(), offset.data(), blocks}, expected.data(), outputs,
                         Number::f32, nullptr, Number::f32};
    avx512bf16::block_matmul.multiply(product, part, 0, groups, 0, rows, {});
    product.y = found.data();
    amx::multiply(product, part, 0, groups, 0, rows, {});
    if (std::memcmp(expected.data(), found.data(), rows * outputs * sizeof(float)) != 0) return false;
  }
  return true;
}

const char* amx_refusal() {
  static const char* const refusal = find_refusal();
  return refusal;
}

#elif defined(__x86_64__)
const char* amx_refusal() { return "the library was built by a compiler without it"; }
bool amx_agrees() { return false; }
#else
const char* amx_refusal() { return ""; }
bool amx_agrees() { return false; }
#endif

}  // namespace phalanx
