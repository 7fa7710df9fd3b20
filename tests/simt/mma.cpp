#include "mma.h"

#include <algorithm>
#include <cmath>

#include "async.h"

namespace simt {

/* ---- numbers ---- */

static float from_fp8(uint8_t bits, int mantissa, bool has_infinity) {
    const int exponents = 7 - mantissa, bias = (1 << (exponents - 1)) - 1;
    const int exponent = bits >> mantissa & ((1 << exponents) - 1), fraction = bits & ((1 << mantissa) - 1);
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    if (exponent == (1 << exponents) - 1) {
        if (has_infinity) return fraction ? NAN : sign * INFINITY;
        if (fraction == (1 << mantissa) - 1) return NAN;
    }
    const float significand = static_cast<float>(fraction) / static_cast<float>(1 << mantissa);
    return sign * (exponent ? std::ldexp(1 + significand, exponent - bias) : std::ldexp(significand, 1 - bias));
}

struct Fp8Table {
    float value[256];
    Fp8Table(int mantissa, bool has_infinity) {
        for (int i = 0; i < 256; ++i) value[i] = from_fp8(static_cast<uint8_t>(i), mantissa, has_infinity);
    }
};

static int bytes_of(Type type) { return type == Type::kTf32 ? 4 : type == Type::kF16 || type == Type::kBf16 ? 2 : 1; }

/* The elements of 4 * kWords bytes. */
template <int kWords>
static inline void decode(Type type, const void *source, float *target) {
    static const Fp8Table e4m3(3, false), e5m2(2, true);
    if (type == Type::kF16) {
        _Float16 half[2 * kWords];
        std::memcpy(half, source, sizeof half);
        for (int i = 0; i < 2 * kWords; ++i) target[i] = static_cast<float>(half[i]);
    } else if (type == Type::kBf16) {
        uint16_t bits[2 * kWords];
        std::memcpy(bits, source, sizeof bits);
        for (int i = 0; i < 2 * kWords; ++i) target[i] = from_bits(uint32_t{bits[i]} << 16);
    } else if (type == Type::kTf32) {
        uint32_t bits[kWords];
        std::memcpy(bits, source, sizeof bits);
        for (int i = 0; i < kWords; ++i) target[i] = from_bits(bits[i] & 0xffffe000u);
    } else {
        const float *table = (type == Type::kE4m3 ? e4m3 : e5m2).value;
        for (int i = 0; i < 4 * kWords; ++i) target[i] = table[static_cast<const uint8_t *>(source)[i]];
    }
}

/* sums (16 x n) += a (16 x k) . b (k x n) */
template <int kWidth>
static void add_products(float *sums, const float *a, const float *b, int n, int k) {
    typedef float Row __attribute__((vector_size(4 * kWidth), aligned(4)));
    for (int column = 0; column < n; column += kWidth) {
        Row sum[16];
#pragma GCC unroll 16
        for (int row = 0; row < 16; ++row) sum[row] = *reinterpret_cast<const Row *>(sums + row * n + column);
        for (int i = 0; i < k; ++i) {
            const Row factor = *reinterpret_cast<const Row *>(b + i * n + column);
#pragma GCC unroll 16
            for (int row = 0; row < 16; ++row) sum[row] += a[row * k + i] * factor;
        }
#pragma GCC unroll 16
        for (int row = 0; row < 16; ++row) *reinterpret_cast<Row *>(sums + row * n + column) = sum[row];
    }
}

/* The same for wgmma of FP8: the 32 products of a step and the running sum are aligned to the largest exponent among
 * them, and what then lies behind 13 fraction bits is cut off. */
static void add_cut_products(float *sums, const float *a, const float *b, int n, int k) {
    constexpr int kWidth = 8, kFractionBits = 13;
    typedef float Row __attribute__((vector_size(4 * kWidth), aligned(4)));
    typedef int32_t Bits __attribute__((vector_size(4 * kWidth), aligned(4)));
    const auto larger = [](Row x, Row y) {
        const Row size = reinterpret_cast<Row>(reinterpret_cast<Bits>(y) & 0x7fffffff);
        return x > size ? x : size;
    };
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < n; column += kWidth) {
            Row &sum = *reinterpret_cast<Row *>(sums + row * n + column);
            const auto product = [&](int i) {
                return a[row * k + i] * *reinterpret_cast<const Row *>(b + i * n + column);
            };
            Row whole = sum, largest = larger(Row{} + 0x1p-100f, sum);
            for (int i = 0; i < k; ++i) whole += product(i), largest = larger(largest, product(i));
            const Bits unit_bits = (reinterpret_cast<Bits>(largest) & 0x7f800000) - (kFractionBits << 23);
            const Row unit = reinterpret_cast<Row>(unit_bits),
                      per_unit = reinterpret_cast<Row>((254 << 23) - unit_bits);
            Bits units = __builtin_convertvector(sum * per_unit, Bits);
            for (int i = 0; i < k; ++i) units += __builtin_convertvector(product(i) * per_unit, Bits);
            sum = whole - whole == 0.0f ? __builtin_convertvector(units, Row) * unit : whole; /* infinity, NaN: as is */
        }
}

/* ---- fragments ---- */

static const Argument &part(const Argument &vector, int i) { return vector.parts[static_cast<size_t>(i)]; }

static char *shared_row(const Frame &frame, const Argument &address, Block &block) {
    const auto place = static_cast<uint32_t>(frame.read(address));
    if (place % 16) fail("ldmatrix: shared memory at 0x%x, expected a multiple of 16", place);
    return block.at(place, 16);
}

/* Matrix i: row r at the address of lane 8 i + r; lane l holds the 32-bit word l % 4 of row l / 4. */
void load_matrices(Frame *const *lanes, const Instruction &instruction) {
    Block &block = *current().in;
    const bool transposed = instruction.transposed;
    const auto count = static_cast<int>(instruction.arguments[0].parts.size());
    for (int matrix = 0; matrix < count; ++matrix) {
        uint16_t element[8][8];
        for (int row = 0; row < 8; ++row)
            std::memcpy(element[row], shared_row(*lanes[8 * matrix + row], instruction.arguments[1], block), 16);
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const uint32_t low = transposed ? element[column][row] : element[row][column];
            const uint32_t high = transposed ? element[column + 1][row] : element[row][column + 1];
            lanes[lane]->set_word(part(instruction.arguments[0], matrix), high << 16 | low);
        }
    }
}

/* The same way back: stmatrix [address], {words}. */
void store_matrices(Frame *const *lanes, const Instruction &instruction) {
    Block &block = *current().in;
    const auto count = static_cast<int>(instruction.arguments[1].parts.size());
    const bool transposed = instruction.transposed;
    for (int matrix = 0; matrix < count; ++matrix) {
        uint16_t element[8][8];
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const uint32_t pair = lanes[lane]->word(part(instruction.arguments[1], matrix));
            (transposed ? element[column][row] : element[row][column]) = static_cast<uint16_t>(pair);
            (transposed ? element[column + 1][row] : element[row][column + 1]) = static_cast<uint16_t>(pair >> 16);
        }
        for (int row = 0; row < 8; ++row)
            std::memcpy(shared_row(*lanes[8 * matrix + row], instruction.arguments[0], block), element[row], 16);
    }
}

/* A fragment of A is quarters of 8 rows and 16 bytes: (0, 0), (8, 0), (0, 16), (8, 16), and where k is 16 bytes only
 * the first two; a lane's word is word lane % 4 of row lane / 4 of its quarter. */
static void decode_a(Type type, int k, const uint32_t (*word)[4], float *a) {
    const int per_word = 4 / bytes_of(type), words = k / per_word / 2;
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < words; ++i)
            decode<1>(type, &word[lane][i], a + (lane / 4 + i % 2 * 8) * k + (i / 2 * 4 + lane % 4) * per_word);
}

void multiply(Frame *const *lanes, const Instruction &instruction) {
    const auto &arguments = instruction.arguments;
    const int k = instruction.k, per_word = 4 / bytes_of(instruction.b), words = k / per_word / 4;
    float a[16 * 32], b[32 * 8], sums[16 * 8];
    uint32_t word[32][4];
    for (int lane = 0; lane < 32; ++lane) {
        const Frame &frame = *lanes[lane];
        const int row = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 2 * words; ++i) word[lane][i] = frame.word(part(arguments[1], i));
        for (int i = 0; i < words; ++i) {
            const uint32_t bits = frame.word(part(arguments[2], i));
            float element[4];
            decode<1>(instruction.b, &bits, element);
            for (int e = 0; e < per_word; ++e) b[((i * 4 + lane % 4) * per_word + e) * 8 + row] = element[e];
        }
        for (int i = 0; i < 4; ++i)
            sums[(row + i / 2 * 8) * 8 + pair + i % 2] = from_bits(frame.word(part(arguments[3], i)));
    }
    decode_a(instruction.a, k, word, a);
    add_products<8>(sums, a, b, 8, k);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            uint32_t bits;
            std::memcpy(&bits, &sums[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2], sizeof bits);
            lanes[lane]->set_word(part(arguments[0], i), bits);
        }
}

/* ---- wgmma ---- */

/* Where 16-byte pieces of an operand lie. K-major: piece p of row r; MN-major: piece r / 8 of the row p of K. */
struct Layout {
    uint32_t start, leading, stride;
    int swizzle;

    explicit Layout(uint64_t descriptor)
        : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
          leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
          stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
          swizzle(static_cast<int>(descriptor >> 62)) {
        if (descriptor >> 49 & 7) fail("wgmma: a base offset in a descriptor is not emulated");
    }
    uint32_t pitch() const { return swizzle == 0 ? 16 : 256u >> swizzle; } /* of a row of an atom */

    uint32_t k_major(uint32_t row, uint32_t piece) const {
        const uint32_t along = swizzle == 0 ? piece * leading : piece * 16;
        return swizzled(start + row / 8 * stride + row % 8 * pitch() + along, swizzle);
    }
    uint32_t mn_major(uint32_t mn, uint32_t k) const { /* mn: a multiple of 8; 16-bit elements */
        if (swizzle == 0) return start + mn / 8 * stride + k % 8 * 16 + k / 8 * leading;
        const uint32_t width = pitch() / 2;
        return swizzled(start + mn / width * leading + mn % width * 2 + k % 8 * pitch() + k / 8 * stride, swizzle);
    }
};

static bool transposed(const Instruction &instruction, int from_end) {
    if (instruction.a != Type::kF16 && instruction.a != Type::kBf16) return false;
    return instruction.arguments[instruction.arguments.size() - static_cast<size_t>(from_end)].value != 0;
}

/* `count` rows of an operand from row `first` on, as (row, k) or as (k, row). */
static void fetch(const Wgmma &product, Type type, uint64_t descriptor, bool mn_major, uint32_t first, uint32_t count,
                  float *target, bool k_first) {
    Block &block = *current().in;
    const Layout layout(descriptor);
    const auto k = static_cast<uint32_t>(product.instruction->k),
               per_piece = static_cast<uint32_t>(16 / bytes_of(type));
    const auto piece = [&](uint32_t address) {
        check_written(block, address, product.issued, product.fenced);
        return block.at(address, 16);
    };
    float element[16];
    for (uint32_t row = 0; row < count; row += mn_major ? 8 : 1)
        for (uint32_t i = 0; i < k; i += mn_major ? 1 : per_piece) {
            decode<4>(type,
                      piece(mn_major ? layout.mn_major(first + row, i) : layout.k_major(first + row, i / per_piece)),
                      element);
            for (uint32_t e = 0; e < per_piece; ++e) {
                const uint32_t at_row = mn_major ? row + e : row, at_k = mn_major ? i : i + e;
                target[k_first ? at_k * count + at_row : at_row * k + at_k] = element[e];
            }
        }
}

static void compute(Wgmma &product, Sums &sums) {
    const Instruction &instruction = *product.instruction;
    const uint32_t first = static_cast<uint32_t>(current().warp->index % 4) * 16;
    float a[16 * 32];
    static float b[32 * 256];
    if (product.holds)
        std::copy(std::begin(product.held), std::end(product.held), a);
    else
        fetch(product, instruction.a, product.a, transposed(instruction, 2), first, 16, a, false);
    fetch(product, instruction.b, product.b, transposed(instruction, 1), 0, static_cast<uint32_t>(instruction.n), b,
          true);
    if (!product.accumulate) std::fill(sums.value.begin(), sums.value.end(), 0.0f);
    const auto add = bytes_of(instruction.a) == 1 ? add_cut_products : add_products<8>;
    add(sums.value.data(), a, b, instruction.n, instruction.k);
    product.done = true;
}

/* Accumulators of all lanes: lane's d[4 j + 2 half + i] is row lane / 4 + 8 half, column 8 j + lane % 4 * 2 + i. */
template <class Visit>
static void for_each_sum(const Wgmma &product, Visit visit) {
    const int n = product.instruction->n;
    for (int lane = 0; lane < 32; ++lane)
        for (int j = 0; j < n / 8; ++j)
            for (int e = 0; e < 4; ++e)
                visit(product.sums[lane][4 * j + e], (lane / 4 + e / 2 * 8) * n + 8 * j + lane % 4 * 2 + e % 2);
}

void wgmma_fence(Frame *const *, const Instruction &) { ++current().warp->wgmma->fences; }

void wgmma_multiply(Frame *const *lanes, const Instruction &instruction) {
    Thread &thread = current();
    WgmmaQueue &queue = *thread.warp->wgmma;
    const auto &arguments = instruction.arguments;
    Wgmma product = {};
    product.instruction = &instruction;
    product.holds = arguments[1].kind == Argument::kVector;
    uint32_t word[32][4];
    for (int lane = 0; lane < 32; ++lane) {
        const Frame &frame = *lanes[lane];
        product.sums[lane] = static_cast<float *>(frame.operand(arguments[0].parts[0]).place);
        if (frame.operand(arguments[0].parts.back()).place != product.sums[lane] + instruction.n / 2 - 1)
            fail("wgmma: accumulators that are not an array in order are not emulated");
        for (int i = 0; product.holds && i < 4; ++i) word[lane][i] = frame.word(part(arguments[1], i));
        if (!product.holds && frame.read(arguments[1]) != lanes[0]->read(arguments[1]))
            fail("wgmma: lanes with different descriptors of A");
        if (frame.read(arguments[2]) != lanes[0]->read(arguments[2]))
            fail("wgmma: lanes with different descriptors of B");
        product.fenced = std::max(product.fenced, thread.warp->threads[lane]->fenced);
    }
    if (arguments[4].value != 1 || arguments[5].value != 1) fail("wgmma: operands with another sign are not emulated");
    if (product.holds)
        decode_a(instruction.a, instruction.k, word, product.held);
    else
        product.a = lanes[0]->read(arguments[1]);
    product.b = lanes[0]->read(arguments[2]);
    product.accumulate = lanes[0]->read(arguments[3]) != 0;
    product.group = queue.groups;
    product.issued = thread.in->in->clock;
    ++queue.count;

    Sums &sums = queue.sums[product.sums[0]];
    if (sums.pending++ == 0) {
        const std::vector<float> left = sums.left;
        sums.value.resize(static_cast<size_t>(16 * instruction.n));
        bool same = left.size() == sums.value.size();
        for_each_sum(product, [&](float &sum, int at) {
            sums.value[static_cast<size_t>(at)] = sum;
            same = same && std::memcmp(&sum, &left[static_cast<size_t>(at)], sizeof sum) == 0;
            sum = NAN; /* until somebody has waited */
        });
        if (!same && queue.fences == sums.fences) fail("wgmma: no wgmma.fence since its accumulators changed");
    }
    queue.products.push_back(product);
    if (!thread.in->in->early()) return;
    for (Wgmma &earlier : queue.products) /* in order */
        if (!earlier.done) compute(earlier, queue.sums[earlier.sums[0]]);
}

void wgmma_commit(Frame *const *, const Instruction &) { ++current().warp->wgmma->groups; }

void wgmma_wait(Frame *const *lanes, const Instruction &instruction) {
    WgmmaQueue &queue = *current().warp->wgmma;
    const uint64_t left = lanes[0]->read(instruction.arguments[0]);
    size_t count = 0;
    for (Wgmma &product : queue.products) {
        if (product.group + left >= queue.groups) break;
        Sums &sums = queue.sums[product.sums[0]];
        if (!product.done) compute(product, sums);
        if (--sums.pending == 0) {
            for_each_sum(product, [&](float &sum, int at) { sum = sums.value[static_cast<size_t>(at)]; });
            sums.left = sums.value;
            sums.fences = queue.fences;
        }
        ++count;
    }
    queue.products.erase(queue.products.begin(), queue.products.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace simt
