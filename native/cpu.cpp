#include "cpu.hpp"

#include <fstream>

#include "amx.hpp"

#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace phalanx {
namespace {

std::vector<Isa> detect() {
  std::vector<Isa> found{Isa::generic};
#if defined(__x86_64__)
  // The compiler's runtime asks the processor, and the operating system whether it saves the wide registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    found.push_back(Isa::avx2);
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
    const bool sums = wide && __builtin_cpu_supports("avx512vnni");
    if (wide) found.push_back(Isa::avx512);
    if (sums) found.push_back(Isa::avx512vnni);
    if (sums && __builtin_cpu_supports("avx512bf16")) {
      found.push_back(Isa::avx512bf16);
      if (*amx_refusal() == '\0') found.push_back(Isa::amx);
    }
  }
#elif defined(__linux__) && defined(__aarch64__)
  if (getauxval(AT_HWCAP) & (1 << 20)) found.push_back(Isa::dotprod);  // HWCAP_ASIMDDP
#endif
  return found;
}

Isa& chosen() {
  static Isa isa = available().back();
  return isa;
}

}  // namespace

const std::vector<Isa>& compiled() {
#if defined(__x86_64__)
  static const std::vector<Isa> all{Isa::generic,    Isa::avx2, Isa::avx512, Isa::avx512vnni, Isa::avx512bf16,
#if defined(PHALANX_AMX)
                                    Isa::amx
#endif
  };
#elif defined(__aarch64__)
  static const std::vector<Isa> all{Isa::generic, Isa::dotprod};
#else
  static const std::vector<Isa> all{Isa::generic};
#endif
  return all;
}

const std::vector<Isa>& available() {
  static const std::vector<Isa> found = detect();
  return found;
}

Isa active() { return chosen(); }

std::size_t cache_of_a_core() {
  static const std::size_t bytes = [] {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index3/";
    std::size_t kilobytes = 0, cores = 0;
    std::ifstream(folder + "size") >> kilobytes;
    std::string map;  // hexadecimal, with commas
    std::ifstream(folder + "shared_cpu_map") >> map;
    for (char digit : map)
      if (digit != ',') cores += __builtin_popcount(std::stoi(std::string(1, digit), nullptr, 16));
    return cores == 0 ? 0 : 1024 * kilobytes / cores;
  }();
  return bytes;
}

bool choose(const std::string& name) {
  for (Isa isa : available()) {
    if (name == name_of(isa)) {
      chosen() = isa;
      return true;
    }
  }
  return false;
}

void assume(const std::string& name) {
  for (Isa isa : compiled())
    if (name == name_of(isa)) chosen() = isa;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512vnni: return "avx512vnni";
    case Isa::avx512bf16: return "avx512bf16";
    case Isa::amx: return "amx";
    case Isa::dotprod: return "dotprod";
    default: return "generic";
  }
}

}  // namespace phalanx
