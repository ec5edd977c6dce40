// Runs AMX's instructions on a processor without them, of one thread: a handler of SIGILL decodes
// those that csrc/host/vector_avx512.cpp has and does what Intel documents (Software Developer's
// Manual, volume 2, LDTILECFG to TDPBSSD). What would be #UD or #GP there ends the process.
#include <signal.h>
#include <sys/ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Tile {
  std::uint32_t rows, row_bytes;
  std::uint8_t bytes[16][64];
};
Tile tiles[8];
bool configured = false;
long instructions = 0;
struct sigaction before;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::_Exit(70);
}

float flushed(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

float bf16(const std::uint8_t* at) {
  std::uint32_t bits = static_cast<std::uint32_t>(at[0] | at[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

void configure(const std::uint8_t* at) {
  bool zeros = at[0] == 1 && at[1] == 0;
  for (int i = 2; i < 16; ++i) zeros = zeros && at[i] == 0;
  for (int i = 32; i < 48; ++i) zeros = zeros && at[i] == 0;
  for (int i = 56; i < 64; ++i) zeros = zeros && at[i] == 0;
  require(zeros, "a configuration of another palette, or with reserved bytes");
  std::memset(tiles, 0, sizeof(tiles));
  for (int i = 0; i < 8; ++i) {
    tiles[i].row_bytes = static_cast<std::uint32_t>(at[16 + 2 * i] | at[17 + 2 * i] << 8);
    tiles[i].rows = at[48 + i];
    require(tiles[i].row_bytes <= 64 && tiles[i].rows <= 16, "a tile that is too large");
    require((tiles[i].row_bytes == 0) == (tiles[i].rows == 0), "a tile with rows or bytes only");
  }
  configured = true;
}

int wrong = 0;  // the opcode of products that leave a sum as it is

void add_bf16(float& sum, const std::uint8_t* x, const Tile& b, std::uint32_t n) {
  float sums[2] = {};
  for (std::uint32_t k = 0; k < b.rows; ++k) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      const float w = bf16(&b.bytes[k][4 * n + 2 * i]);
      sums[i] = flushed(std::fma(bf16(x + 4 * k + 2 * i), w, sums[i]));
    }
  }
  sum = flushed(flushed(sum) + flushed(sums[0] + sums[1]));
}

void add_int8(std::int32_t& sum, const std::uint8_t* x, const Tile& b, std::uint32_t n) {
  for (std::uint32_t k = 0; k < 4 * b.rows; ++k) {
    const std::uint8_t w = b.bytes[k / 4][4 * n + k % 4];
    sum += static_cast<std::int8_t>(x[k]) * static_cast<std::int8_t>(w);
  }
}

// `add(sum, x, b, n)` adds the product of the bytes at x and column n of b.
template <class Sum>
void multiply(int opcode, Tile& c, const Tile& a, const Tile& b,
              void (*add)(Sum&, const std::uint8_t*, const Tile&, std::uint32_t)) {
  require(&c != &a && &c != &b && &a != &b, "a tile twice in a product");
  require(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows,
          "tiles of a product that do not fit");
  for (std::uint32_t m = 0; m < c.rows; ++m) {
    for (std::uint32_t n = 0; n < c.row_bytes / 4; ++n) {
      Sum sum;
      std::memcpy(&sum, &c.bytes[m][4 * n], 4);
      if (opcode != wrong || m != 0 || n != 0) add(sum, a.bytes[m], b, n);
      std::memcpy(&c.bytes[m][4 * n], &sum, 4);
    }
  }
}

struct Memory {
  std::uint8_t* base;
  std::int64_t stride;
  std::size_t length;  // of ModRM and what follows it
};

// The operand in memory; `registers` in the order of their numbers.
Memory memory(const std::uint8_t* modrm, const std::uint64_t* registers, int high_index,
              int high_base) {
  const int mod = modrm[0] >> 6;
  std::uint64_t base = 0;
  Memory found{nullptr, 0, 1};
  if ((modrm[0] & 7) == 4) {
    const int index = (modrm[1] >> 3 & 7) | high_index;
    require(mod != 0 || (modrm[1] & 7) != 5, "an address without a base, which is not emulated");
    base = registers[(modrm[1] & 7) | high_base];
    if (index != 4) {
      found.stride = static_cast<std::int64_t>(registers[index]) << (modrm[1] >> 6);
    }
    found.length = 2;
  } else {
    require(mod != 0 || (modrm[0] & 7) != 5, "an address by rip, which is not emulated");
    base = registers[(modrm[0] & 7) | high_base];
  }
  std::int32_t displacement = 0;
  if (mod == 1) displacement = static_cast<std::int8_t>(modrm[found.length]);
  if (mod == 2) std::memcpy(&displacement, modrm + found.length, 4);
  found.length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
  found.base = reinterpret_cast<std::uint8_t*>(base + static_cast<std::int64_t>(displacement));
  return found;
}

// Returns the length of the instruction that it did; 0: that is none of AMX's.
std::size_t run(const std::uint8_t* code, const std::uint64_t* registers) {
  enum { kNone = 0, kF3 = 2, kF2 = 3 };
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;
  const int prefix = code[2] & 3, opcode = code[3], reg = code[4] >> 3 & 7, rm = code[4] & 7;
  const bool in_memory = code[4] >> 6 != 3;
  if (in_memory) {
    const Memory at = memory(code + 4, registers, code[1] & 0x40 ? 0 : 8, code[1] & 0x20 ? 0 : 8);
    if (opcode == 0x49 && prefix == kNone && reg == 0) {
      configure(at.base);
    } else if (opcode == 0x4b && (prefix == kF2 || prefix == kF3)) {
      require(configured, "tiles without a configuration");
      Tile& tile = tiles[reg];
      for (std::uint32_t row = 0; row < tile.rows; ++row) {
        std::uint8_t* const line = at.base + row * at.stride;
        if (prefix == kF2) std::memcpy(tile.bytes[row], line, tile.row_bytes);
        if (prefix == kF3) std::memcpy(line, tile.bytes[row], tile.row_bytes);
      }
    } else {
      return 0;
    }
    return 4 + at.length;
  }
  if (opcode == 0x49 && prefix == kNone && reg == 0 && rm == 0) {
    configured = false;
  } else if (opcode == 0x49 && prefix == kF2) {
    require(configured, "tiles without a configuration");
    std::memset(tiles[reg].bytes, 0, sizeof(tiles[reg].bytes));
  } else if ((opcode == 0x5c && prefix == kF3) || (opcode == 0x5e && prefix == kF2)) {
    require(configured, "tiles without a configuration");
    const Tile& a = tiles[rm];
    const Tile& b = tiles[(code[2] >> 3 & 7) ^ 7];
    if (opcode == 0x5c) multiply(opcode, tiles[reg], a, b, add_bf16);
    if (opcode == 0x5e) multiply(opcode, tiles[reg], a, b, add_int8);
  } else {
    return 0;
  }
  return 5;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* const all = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  std::uint64_t registers[16];
  for (int i = 0; i < 16; ++i) registers[i] = static_cast<std::uint64_t>(all[kOrder[i]]);
  const std::size_t length = run(reinterpret_cast<const std::uint8_t*>(all[REG_RIP]), registers);
  require(length != 0, "SIGILL at an instruction that is not emulated");
  all[REG_RIP] += static_cast<greg_t>(length);
  ++instructions;
}

}  // namespace

extern "C" void emulate_amx(int wrong_opcode) {
  wrong = wrong_opcode;
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}

// Returns how many instructions were emulated, and whether a configuration was left behind.
extern "C" long stop_emulation(bool* left) {
  sigaction(SIGILL, &before, nullptr);
  *left = configured;
  return instructions;
}
