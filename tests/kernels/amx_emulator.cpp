// AMX's tiles and int8 products for a processor without them: instructions that it does not know are decoded and done
// here, as Intel's manual has them, when they raise SIGILL. So what is tested is the library as it is. What the processor
// would refuse (a tile that is not configured, sizes that do not fit) ends the process.
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  int rows, bytes;  // as configured; 0 where the tile is not
  std::uint8_t data[kMostRows][kMostBytes];
};
struct Tiles {
  bool configured;
  Tile tile[kTiles];
};
thread_local Tiles tiles;  // each thread has its own
std::atomic<long> products{0};
bool takes_weights_as_signed = false;
struct sigaction before;

[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "AMX emulator: %s\n", what);
  std::abort();
}

void expect(bool good, const char* what) {
  if (!good) refuse(what);
}

struct Instruction {
  bool knows = false;
  int opcode, prefix, reg, rm, vvvv, length;  // `rm` is -1 for memory
  const std::uint8_t* base = nullptr;         // the address, but for a strided one's index
  std::int64_t stride = 0;
  bool strided = false;
};

// VEX.128.0F38.W0 with three bytes of prefix.
Instruction decode(const std::uint8_t* code, const greg_t* registers) {
  static constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const auto value = [&](int number) { return static_cast<std::int64_t>(registers[kOrder[number]]); };
  Instruction found;
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return found;
  const int high_reg = code[1] & 0x80 ? 0 : 8, high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8;
  found.knows = true;
  found.prefix = code[2] & 3;
  found.vvvv = ~(code[2] >> 3) & 15;
  found.opcode = code[3];
  const int mod = code[4] >> 6;
  found.reg = (code[4] >> 3 & 7) + high_reg;
  found.rm = (code[4] & 7) + high_base;
  const std::uint8_t* at = code + 5;
  if (mod != 3) {
    int base = found.rm;
    found.strided = (code[4] & 7) == 4;
    if (found.strided) {
      const int index = (*at >> 3 & 7) + high_index;
      base = (*at & 7) + high_base;
      if (index != 4) found.stride = value(index) * (1 << (*at >> 6));
      ++at;
    }
    found.rm = -1;
    const bool no_base = mod == 0 && (base & 7) == 5;
    std::int64_t address = no_base ? 0 : value(base);
    if (mod == 1) {
      address += static_cast<std::int8_t>(*at++);
    } else if (mod == 2 || no_base) {
      std::int32_t displacement;
      std::memcpy(&displacement, at, 4);
      at += 4;
      address += displacement;
      if (no_base && !found.strided) address += reinterpret_cast<std::int64_t>(at);  // from the next instruction on
    }
    found.base = reinterpret_cast<const std::uint8_t*>(address);
  }
  found.length = static_cast<int>(at - code);
  return found;
}

void configure(const std::uint8_t* from) {
  tiles = {};
  if (from[0] == 0) return;
  expect(from[0] == 1, "an unknown palette");
  for (int i = 1; i < 64; ++i)
    expect(!(i < 16 || (i >= 32 && i < 48) || i >= 56) || from[i] == 0, "a reserved byte of the configuration");
  for (int t = 0; t < kTiles; ++t) {
    Tile& tile = tiles.tile[t];
    tile.bytes = from[16 + 2 * t] | from[17 + 2 * t] << 8;
    tile.rows = from[48 + t];
    expect(tile.rows <= kMostRows && tile.bytes <= kMostBytes, "a tile that is too large");
    expect((tile.rows == 0) == (tile.bytes == 0), "a tile with rows or bytes alone");
  }
  tiles.configured = true;
}

Tile& tile_at(int number) {
  expect(tiles.configured, "this thread has no tiles");
  expect(number < kTiles && tiles.tile[number].rows > 0, "a tile that is not configured");
  return tiles.tile[number];
}

void multiply(Tile& sums, const Tile& a, const Tile& b, bool a_signed, bool b_signed) {
  expect(&sums != &a && &sums != &b && &a != &b, "tiles of a product that are the same");
  expect(sums.rows == a.rows && sums.bytes == b.bytes && a.bytes == 4 * b.rows && sums.bytes % 4 == 0,
         "tiles of a product that do not fit");
  const auto number = [](std::uint8_t byte, bool is_signed) { return is_signed ? static_cast<std::int8_t>(byte) : int{byte}; };
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < sums.bytes / 4; ++n) {
      std::uint32_t sum;
      std::memcpy(&sum, &sums.data[m][4 * n], 4);
      for (int k = 0; k < b.rows; ++k)
        for (int i = 0; i < 4; ++i)
          sum += number(a.data[m][4 * k + i], a_signed) * number(b.data[k][4 * n + i], b_signed);
      std::memcpy(&sums.data[m][4 * n], &sum, 4);
    }
  ++products;
}

enum { kNone, k66, kF3, kF2 };  // prefixes, as VEX has them

bool run(const Instruction& i) {
  if (!i.knows) return false;
  const bool memory = i.rm < 0;
  if (i.opcode == 0x49 && i.prefix == kNone && i.reg == 0 && i.vvvv == 0) {  // LDTILECFG, TILERELEASE
    if (memory) configure(i.base);
    else tiles = {};
  } else if (i.opcode == 0x49 && i.prefix == kF2 && !memory && i.rm == 0) {  // TILEZERO
    std::memset(tile_at(i.reg).data, 0, sizeof(Tile::data));
  } else if (i.opcode == 0x4b && (i.prefix == kF2 || i.prefix == k66) && i.strided) {  // TILELOADD, TILELOADDT1
    Tile& tile = tile_at(i.reg);
    std::memset(tile.data, 0, sizeof tile.data);
    for (int r = 0; r < tile.rows; ++r) std::memcpy(tile.data[r], i.base + r * i.stride, tile.bytes);
  } else if (i.opcode == 0x4b && i.prefix == kF3 && i.strided) {  // TILESTORED
    const Tile& tile = tile_at(i.reg);
    for (int r = 0; r < tile.rows; ++r)
      std::memcpy(const_cast<std::uint8_t*>(i.base) + r * i.stride, tile.data[r], tile.bytes);
  } else if (i.opcode == 0x5e && !memory) {  // TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD
    const bool a_signed = i.prefix == kF3 || i.prefix == kF2, b_signed = i.prefix == k66 || i.prefix == kF2;
    multiply(tile_at(i.reg), tile_at(i.rm), tile_at(i.vvvv), a_signed, b_signed || takes_weights_as_signed);
  } else {
    return false;
  }
  return true;
}

void on_unknown(int, siginfo_t*, void* state) {
  greg_t* registers = static_cast<ucontext_t*>(state)->uc_mcontext.gregs;
  const Instruction instruction = decode(reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]), registers);
  if (!run(instruction)) refuse("an instruction that is not AMX's");
  registers[REG_RIP] += instruction.length;
}

}  // namespace

extern "C" {
void start(bool wrong) {
  takes_weights_as_signed = wrong;
  struct sigaction action {};
  action.sa_sigaction = on_unknown;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}
void stop() { sigaction(SIGILL, &before, nullptr); }
long product_count() { return products; }
int has_tiles() { return tiles.configured; }
}
