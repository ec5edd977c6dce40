// Emulates AMX for one thread on a processor without it.
// A SIGILL handler decodes the instructions that csrc/host/vector_avx512.cpp uses and executes them
// as documented (Intel Software Developer's Manual, volume 2, LDTILECFG to TDPBSSD). If an
// instruction would raise #UD or #GP, the process ends.
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
struct sigaction previous_action;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::_Exit(70);
}

float flush_subnormal(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

float bf16(const std::uint8_t* src) {
  std::uint32_t bits = static_cast<std::uint32_t>(src[0] | src[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flush_subnormal(value);
}

void configure(const std::uint8_t* config) {
  bool zeros = config[0] == 1 && config[1] == 0;
  for (int i = 2; i < 16; ++i) zeros = zeros && config[i] == 0;
  for (int i = 32; i < 48; ++i) zeros = zeros && config[i] == 0;
  for (int i = 56; i < 64; ++i) zeros = zeros && config[i] == 0;
  require(zeros, "a configuration of another palette, or with reserved bytes");
  std::memset(tiles, 0, sizeof(tiles));
  for (int i = 0; i < 8; ++i) {
    tiles[i].row_bytes = static_cast<std::uint32_t>(config[16 + 2 * i] | config[17 + 2 * i] << 8);
    tiles[i].rows = config[48 + i];
    require(tiles[i].row_bytes <= 64 && tiles[i].rows <= 16, "a tile that is too large");
    require((tiles[i].row_bytes == 0) == (tiles[i].rows == 0), "a tile with rows or bytes only");
  }
  configured = true;
}

int faulty_opcode = 0;  // fault injection: matmuls with this opcode do not update element (0, 0)

void add_bf16(float& sum, const std::uint8_t* x, const Tile& b, std::uint32_t n) {
  float sums[2] = {};
  for (std::uint32_t k = 0; k < b.rows; ++k) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      const float w = bf16(&b.bytes[k][4 * n + 2 * i]);
      sums[i] = flush_subnormal(std::fma(bf16(x + 4 * k + 2 * i), w, sums[i]));
    }
  }
  sum = flush_subnormal(flush_subnormal(sum) + flush_subnormal(sums[0] + sums[1]));
}

void add_int8(std::int32_t& sum, const std::uint8_t* x, const Tile& b, std::uint32_t n) {
  for (std::uint32_t k = 0; k < 4 * b.rows; ++k) {
    const std::uint8_t w = b.bytes[k / 4][4 * n + k % 4];
    sum += static_cast<std::int8_t>(x[k]) * static_cast<std::int8_t>(w);
  }
}

// `add(sum, x, b, n)` adds the dot product of the bytes at x and column n of b.
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
      if (opcode != faulty_opcode || m != 0 || n != 0) add(sum, a.bytes[m], b, n);
      std::memcpy(&c.bytes[m][4 * n], &sum, 4);
    }
  }
}

struct Memory {
  std::uint8_t* base;
  std::int64_t stride;
  std::size_t length;  // bytes of ModRM, SIB and displacement
};

// Decodes the memory operand. `registers` are in the order of their numbers.
Memory decode_memory(const std::uint8_t* modrm, const std::uint64_t* registers, int high_index,
                     int high_base) {
  const int mod = modrm[0] >> 6;
  std::uint64_t base = 0;
  Memory operand{nullptr, 0, 1};
  if ((modrm[0] & 7) == 4) {
    const int index = (modrm[1] >> 3 & 7) | high_index;
    require(mod != 0 || (modrm[1] & 7) != 5, "an address without a base, which is not emulated");
    base = registers[(modrm[1] & 7) | high_base];
    if (index != 4) {
      operand.stride = static_cast<std::int64_t>(registers[index]) << (modrm[1] >> 6);
    }
    operand.length = 2;
  } else {
    require(mod != 0 || (modrm[0] & 7) != 5, "an address by rip, which is not emulated");
    base = registers[(modrm[0] & 7) | high_base];
  }
  std::int32_t displacement = 0;
  if (mod == 1) displacement = static_cast<std::int8_t>(modrm[operand.length]);
  if (mod == 2) std::memcpy(&displacement, modrm + operand.length, 4);
  operand.length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
  operand.base = reinterpret_cast<std::uint8_t*>(base + static_cast<std::int64_t>(displacement));
  return operand;
}

// Executes one instruction and returns its length, or 0 if it is not an AMX instruction.
std::size_t run(const std::uint8_t* code, const std::uint64_t* registers) {
  enum { kNone = 0, kF3 = 2, kF2 = 3 };
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;
  const int prefix = code[2] & 3, opcode = code[3], reg = code[4] >> 3 & 7, rm = code[4] & 7;
  const bool in_memory = code[4] >> 6 != 3;
  if (in_memory) {
    const Memory operand =
        decode_memory(code + 4, registers, code[1] & 0x40 ? 0 : 8, code[1] & 0x20 ? 0 : 8);
    if (opcode == 0x49 && prefix == kNone && reg == 0) {
      configure(operand.base);
    } else if (opcode == 0x4b && (prefix == kF2 || prefix == kF3)) {
      require(configured, "tiles without a configuration");
      Tile& tile = tiles[reg];
      for (std::uint32_t row = 0; row < tile.rows; ++row) {
        std::uint8_t* const line = operand.base + row * operand.stride;
        if (prefix == kF2) std::memcpy(tile.bytes[row], line, tile.row_bytes);
        if (prefix == kF3) std::memcpy(line, tile.bytes[row], tile.row_bytes);
      }
    } else {
      return 0;
    }
    return 4 + operand.length;
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
  greg_t* const gregs = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  std::uint64_t registers[16];
  for (int i = 0; i < 16; ++i) registers[i] = static_cast<std::uint64_t>(gregs[kOrder[i]]);
  const std::size_t length = run(reinterpret_cast<const std::uint8_t*>(gregs[REG_RIP]), registers);
  require(length != 0, "SIGILL at an instruction that is not emulated");
  gregs[REG_RIP] += static_cast<greg_t>(length);
  ++instructions;
}

}  // namespace

// Starts the emulation. Matmuls with `opcode` are faulty; 0: no fault.
extern "C" void emulate_amx(int opcode) {
  faulty_opcode = opcode;
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &previous_action);
}

// Returns the number of emulated instructions. `*unreleased`: whether a configuration was not
// released.
extern "C" long stop_emulation(bool* unreleased) {
  sigaction(SIGILL, &previous_action, nullptr);
  *unreleased = configured;
  return instructions;
}
