// Which instruction set the kernels use. Each kernel is compiled for all that the compiler's target has; the best one
// that processor and operating system allow is chosen when the module is loaded, or by name afterwards.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace phalanx {

enum class Isa { generic, avx2, avx512, avx512vnni, avx512bf16, amx, dotprod };

// What the library has kernels for, the least first.
const std::vector<Isa>& compiled();
// What this machine can run of them. avx512bf16 includes VNNI, and amx that, which has most kernels from it.
const std::vector<Isa>& available();
// For tests: false when this machine cannot run it.
bool choose(const std::string& name);
// For tests with an emulator: whatever the machine can run.
void assume(const std::string& name);
Isa active();
const char* name_of(Isa isa);

// Bytes of the third cache for each core that shares it; 0 where the system does not say.
std::size_t cache_of_a_core();

// In a kernel's header, after `struct Table { … function pointers … };`:
//     PHALANX_DECLARE_TABLES(Table, table_name)
// declares phalanx::<isa>::table_name for each, and phalanx::table_name(), which picks the active one's.
// kernels/<name>.cpp defines phalanx::PHALANX_ISA::table_name.
#define PHALANX_DECLARE_TABLES(Table, table)          \
  PHALANX_DECLARE_EACH_(Table, table)                 \
  inline const Table& table() {                       \
    switch (active()) {                               \
      PHALANX_CASES_(table)                           \
      default: return generic::table;                 \
    }                                                 \
  }

#if defined(__x86_64__)
#define PHALANX_DECLARE_EACH_(Table, table)             \
  namespace generic { extern const Table table; }     \
  namespace avx2 { extern const Table table; }        \
  namespace avx512 { extern const Table table; }      \
  namespace avx512vnni { extern const Table table; }  \
  namespace avx512bf16 { extern const Table table; }
#define PHALANX_CASES_(table)                           \
  case Isa::avx2: return avx2::table;                 \
  case Isa::avx512: return avx512::table;             \
  case Isa::avx512vnni: return avx512vnni::table;     \
  case Isa::amx:                                      \
  case Isa::avx512bf16: return avx512bf16::table;
#elif defined(__aarch64__)
#define PHALANX_DECLARE_EACH_(Table, table)             \
  namespace generic { extern const Table table; }     \
  namespace dotprod { extern const Table table; }
#define PHALANX_CASES_(table) \
  case Isa::dotprod: return dotprod::table;
#else
#define PHALANX_DECLARE_EACH_(Table, table) namespace generic { extern const Table table; }
#define PHALANX_CASES_(table)
#endif

}  // namespace phalanx
