/*
 * The body of the vector kernels, included once by each simd_<isa>.c after it has defined
 *
 *     SIMD_NAME        the name in FLEXGEMM_CPU_ISA
 *     SIMD_TABLE       the fg_simd to fill
 *     SIMD_LANES       floats of one vector
 *     SIMD_VECTORS     vectors of a panel, 2 or 4: ROWS * SIMD_VECTORS accumulators must fit the register file
 *     SIMD_FMA(a, b, c), SIMD_BROADCAST(x)
 *     SIMD_WIDEN_8(codes), SIMD_WIDEN_16(codes)    vuint8, vuint16 -> vuint
 *     SIMD_NARROW_8(x), SIMD_NARROW_16(x)          vuint, of values that fit, -> vuint8, vuint16
 *     SIMD_DECODE_FLOAT16(codes), SIMD_ENCODE_FLOAT16(x)    where the hardware converts
 *
 * Everything else is plain C over the compiler's vector types. Blocks are always-inline functions whose loop bounds
 * become constants in each caller, so that the accumulators live in registers.
 */
#include <string.h>

#include "simd.h"

#define SIMD_INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define SIMD_UNROLL _Pragma("unroll")
#else
#define SIMD_UNROLL _Pragma("GCC unroll 8")
#endif

enum { ROWS = 6, LANES = SIMD_LANES }; /* 6 rows: as many row pointers as stay in x86-64's 16 integer registers */

typedef float vfloat __attribute__((vector_size(4 * SIMD_LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * SIMD_LANES)));
typedef uint16_t vuint16 __attribute__((vector_size(2 * SIMD_LANES)));
typedef uint8_t vuint8 __attribute__((vector_size(SIMD_LANES)));

SIMD_INLINE vfloat load(const float *p) {
    vfloat v;
    memcpy(&v, p, sizeof v);
    return v;
}

SIMD_INLINE void store(float *p, vfloat v) { memcpy(p, &v, sizeof v); }

/* ---- products ---- */

SIMD_INLINE void multiply_block(const int rows, const int vectors, int64_t k, const float *const *a, const float *b,
                                float *const *c, int64_t c_offset) {
    vfloat sum[ROWS][SIMD_VECTORS];
    const float *row[ROWS];
    SIMD_UNROLL
    for (int r = 0; r < rows; r++) {
        row[r] = a[r];
        SIMD_UNROLL
        for (int v = 0; v < vectors; v++) sum[r][v] = (vfloat){0};
    }
    for (int64_t p = 0; p < k; p++, b += vectors * LANES) {
        vfloat column[SIMD_VECTORS];
        SIMD_UNROLL
        for (int v = 0; v < vectors; v++) column[v] = load(b + v * LANES);
        SIMD_UNROLL
        for (int r = 0; r < rows; r++) {
            const vfloat x = SIMD_BROADCAST(row[r][p]);
            SIMD_UNROLL
            for (int v = 0; v < vectors; v++) sum[r][v] = SIMD_FMA(x, column[v], sum[r][v]);
        }
    }
    SIMD_UNROLL
    for (int r = 0; r < rows; r++) {
        float *target = c[r] + c_offset;
        SIMD_UNROLL
        for (int v = 0; v < vectors; v++) store(target + v * LANES, load(target + v * LANES) + sum[r][v]);
    }
}

SIMD_INLINE void multiply_panel(const int vectors, int64_t rows, int64_t k, const float *const *a, const float *b,
                                float *const *c, int64_t c_offset) {
    for (; rows >= ROWS; rows -= ROWS, a += ROWS, c += ROWS) multiply_block(ROWS, vectors, k, a, b, c, c_offset);
    switch (rows) {
        case 5:
            multiply_block(5, vectors, k, a, b, c, c_offset);
            break;
        case 4:
            multiply_block(4, vectors, k, a, b, c, c_offset);
            break;
        case 3:
            multiply_block(3, vectors, k, a, b, c, c_offset);
            break;
        case 2:
            multiply_block(2, vectors, k, a, b, c, c_offset);
            break;
        case 1:
            multiply_block(1, vectors, k, a, b, c, c_offset);
            break;
        default:
            break;
    }
}

static void multiply(int64_t rows, int64_t k, int64_t width, const float *const *a, const float *b, float *const *c,
                     int64_t c_offset) {
    switch (width / LANES) {
        case 1:
            multiply_panel(1, rows, k, a, b, c, c_offset);
            break;
        case 2:
            multiply_panel(2, rows, k, a, b, c, c_offset);
            break;
#if SIMD_VECTORS == 4
        case 3:
            multiply_panel(3, rows, k, a, b, c, c_offset);
            break;
        case 4:
            multiply_panel(4, rows, k, a, b, c, c_offset);
            break;
#endif
        default:
            break;
    }
}

SIMD_INLINE void outer_block(const int rows, const int vectors, int64_t k, const float *const *a, int64_t a_offset,
                             const float *const *b, float *c, int64_t c_stride) {
    vfloat sum[ROWS][SIMD_VECTORS];
    SIMD_UNROLL
    for (int r = 0; r < rows; r++) {
        SIMD_UNROLL
        for (int v = 0; v < vectors; v++) sum[r][v] = (vfloat){0};
    }
    for (int64_t p = 0; p < k; p++) {
        const float *left = a[p] + a_offset, *right = b[p];
        vfloat column[SIMD_VECTORS];
        SIMD_UNROLL
        for (int v = 0; v < vectors; v++) column[v] = load(right + v * LANES);
        SIMD_UNROLL
        for (int r = 0; r < rows; r++) {
            const vfloat x = SIMD_BROADCAST(left[r]);
            SIMD_UNROLL
            for (int v = 0; v < vectors; v++) sum[r][v] = SIMD_FMA(x, column[v], sum[r][v]);
        }
    }
    SIMD_UNROLL
    for (int r = 0; r < rows; r++) {
        float *target = c + r * c_stride;
        SIMD_UNROLL
        for (int v = 0; v < vectors; v++) store(target + v * LANES, load(target + v * LANES) + sum[r][v]);
    }
}

SIMD_INLINE void outer_panel(const int vectors, int64_t rows, int64_t k, const float *const *a, int64_t a_offset,
                             const float *const *b, float *c, int64_t c_stride) {
    for (; rows >= ROWS; rows -= ROWS, a_offset += ROWS, c += ROWS * c_stride)
        outer_block(ROWS, vectors, k, a, a_offset, b, c, c_stride);
    switch (rows) {
        case 5:
            outer_block(5, vectors, k, a, a_offset, b, c, c_stride);
            break;
        case 4:
            outer_block(4, vectors, k, a, a_offset, b, c, c_stride);
            break;
        case 3:
            outer_block(3, vectors, k, a, a_offset, b, c, c_stride);
            break;
        case 2:
            outer_block(2, vectors, k, a, a_offset, b, c, c_stride);
            break;
        case 1:
            outer_block(1, vectors, k, a, a_offset, b, c, c_stride);
            break;
        default:
            break;
    }
}

static void outer(int64_t rows, int64_t k, int64_t width, const float *const *a, const float *const *b, float *c,
                  int64_t c_stride) {
    switch (width / LANES) {
        case 1:
            outer_panel(1, rows, k, a, 0, b, c, c_stride);
            break;
        case 2:
            outer_panel(2, rows, k, a, 0, b, c, c_stride);
            break;
#if SIMD_VECTORS == 4
        case 3:
            outer_panel(3, rows, k, a, 0, b, c, c_stride);
            break;
        case 4:
            outer_panel(4, rows, k, a, 0, b, c, c_stride);
            break;
#endif
        default:
            break;
    }
}

/* ---- conversions ----
 * The small formats differ in five numbers. Below, `magnitude` is a code without its sign bit. */

typedef struct {
    uint32_t bits;          /* of a code, sign included */
    uint32_t mantissa;      /* bits */
    uint32_t bias;          /* of the exponent */
    uint32_t first_special; /* the lowest magnitude that is infinity or NaN */
    uint32_t largest;       /* the magnitude that overflow becomes: infinity, or the largest finite one to saturate */
    uint32_t nan;           /* the magnitude that NaN becomes */
} small_format;

static const small_format float8_e4m3fn = {8, 3, 7, 0x7f, 0x7e, 0x7f};
static const small_format float8_e5m2 = {8, 2, 15, 0x7c, 0x7b, 0x7f};

SIMD_INLINE vuint splat(uint32_t x) { return (vuint){0} + x; }

SIMD_INLINE vuint select(vuint mask, vuint yes, vuint no) { return (mask & yes) | (~mask & no); }

/* 2^e as float32 bits. */
SIMD_INLINE uint32_t power_of_two(int32_t e) { return (uint32_t)(127 + e) << 23; }

SIMD_INLINE vfloat decode(const small_format f, vuint code) {
    const uint32_t shift = 23 - f.mantissa;
    const vuint sign = (code >> (f.bits - 1)) << 31;
    const vuint magnitude = code & ((1u << (f.bits - 1)) - 1);
    const vuint normal = (magnitude << shift) + ((127 - f.bias) << 23);
    const vuint special = (magnitude << shift) | 0x7f800000u;
    /* A subnormal is an integer multiple of the smallest step: an exact product. */
    const vfloat step = (vfloat)splat(power_of_two(1 - (int32_t)(f.bias + f.mantissa)));
    const vuint subnormal = (vuint)(__builtin_convertvector(magnitude, vfloat) * step);
    vuint bits = select((vuint)(magnitude < splat(1u << f.mantissa)), subnormal, normal);
    bits = select((vuint)(magnitude >= splat(f.first_special)), special, bits);
    return (vfloat)(bits | sign);
}

SIMD_INLINE vuint encode(const small_format f, vfloat x) {
    const uint32_t shift = 23 - f.mantissa;
    const vuint bits = (vuint)x, magnitude = bits & 0x7fffffffu;
    const vuint sign = (bits >> 31) << (f.bits - 1);
    const vuint rounded = magnitude + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1u);
    const vuint normal = (rounded >> shift) - ((127 - f.bias) << f.mantissa);
    /* Added to a power of two whose last place is the smallest step, a subnormal is rounded by the addition. */
    const uint32_t anchor = power_of_two(24 - (int32_t)(f.bias + f.mantissa));
    const vuint subnormal = (vuint)((vfloat)magnitude + (vfloat)splat(anchor)) - anchor;
    const uint32_t first_normal = power_of_two(1 - (int32_t)f.bias);
    vuint code = select((vuint)(magnitude < splat(first_normal)), subnormal, normal);
    code = select((vuint)(code > splat(f.largest)), splat(f.largest), code);
    code = select((vuint)(magnitude > splat(0x7f800000u)), splat(f.nan), code);
    return code | sign;
}

/* vuint8 or vuint16 codes <-> vfloat. */

SIMD_INLINE vfloat decode_e4m3fn(vuint8 codes) { return decode(float8_e4m3fn, SIMD_WIDEN_8(codes)); }
SIMD_INLINE vuint8 encode_e4m3fn(vfloat x) { return SIMD_NARROW_8(encode(float8_e4m3fn, x)); }
SIMD_INLINE vfloat decode_e5m2(vuint8 codes) { return decode(float8_e5m2, SIMD_WIDEN_8(codes)); }
SIMD_INLINE vuint8 encode_e5m2(vfloat x) { return SIMD_NARROW_8(encode(float8_e5m2, x)); }

#if defined(SIMD_DECODE_FLOAT16)
SIMD_INLINE vfloat decode_float16(vuint16 codes) { return SIMD_DECODE_FLOAT16(codes); }
SIMD_INLINE vuint16 encode_float16(vfloat x) { return SIMD_ENCODE_FLOAT16(x); }
#else
static const small_format float16 = {16, 10, 15, 0x7c00, 0x7c00, 0x7e00};
SIMD_INLINE vfloat decode_float16(vuint16 codes) { return decode(float16, SIMD_WIDEN_16(codes)); }
SIMD_INLINE vuint16 encode_float16(vfloat x) { return SIMD_NARROW_16(encode(float16, x)); }
#endif

SIMD_INLINE vfloat decode_bfloat16(vuint16 codes) { return (vfloat)(SIMD_WIDEN_16(codes) << 16); }

SIMD_INLINE vuint16 encode_bfloat16(vfloat x) {
    const vuint bits = (vuint)x;
    const vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return SIMD_NARROW_16(select((vuint)((bits & 0x7fffffffu) > splat(0x7f800000u)), (bits >> 16) | 0x40u, rounded));
}

/* Rows of any length: whole vectors straight from and to memory, the tail through a vector padded with zeros. */
#define SIMD_CONVERSIONS(format, vcodes, code_type)                                                                    \
    static void format##_to_float(float *dst, const void *src, int64_t n) {                                            \
        const code_type *codes = src;                                                                                  \
        vcodes vector;                                                                                                 \
        for (; n >= LANES; n -= LANES, codes += LANES, dst += LANES) {                                                 \
            memcpy(&vector, codes, sizeof vector);                                                                     \
            store(dst, decode_##format(vector));                                                                       \
        }                                                                                                              \
        if (n <= 0) return;                                                                                            \
        vector = (vcodes){0};                                                                                          \
        memcpy(&vector, codes, (size_t)n * sizeof(code_type));                                                         \
        const vfloat x = decode_##format(vector);                                                                      \
        memcpy(dst, &x, (size_t)n * sizeof(float));                                                                    \
    }                                                                                                                  \
    static void format##_from_float(void *dst, const float *src, int64_t n) {                                          \
        code_type *codes = dst;                                                                                        \
        for (; n >= LANES; n -= LANES, codes += LANES, src += LANES) {                                                 \
            const vcodes vector = encode_##format(load(src));                                                          \
            memcpy(codes, &vector, sizeof vector);                                                                     \
        }                                                                                                              \
        if (n <= 0) return;                                                                                            \
        vfloat x = {0};                                                                                                \
        memcpy(&x, src, (size_t)n * sizeof(float));                                                                    \
        const vcodes vector = encode_##format(x);                                                                      \
        memcpy(codes, &vector, (size_t)n * sizeof(code_type));                                                         \
    }

SIMD_CONVERSIONS(float16, vuint16, uint16_t)
SIMD_CONVERSIONS(bfloat16, vuint16, uint16_t)
SIMD_CONVERSIONS(e4m3fn, vuint8, uint8_t)
SIMD_CONVERSIONS(e5m2, vuint8, uint8_t)

/* An array of no elements may have no address, which memcpy must not be given. */
static void float32_to_float(float *dst, const void *src, int64_t n) {
    if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
}
static void float32_from_float(void *dst, const float *src, int64_t n) {
    if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
}

const fg_simd SIMD_TABLE = {
    .name = SIMD_NAME,
    .lanes = LANES,
    .panel = SIMD_VECTORS * LANES,
    .multiply = multiply,
    .outer = outer,
    .to_float = {float32_to_float, float16_to_float, bfloat16_to_float, e4m3fn_to_float, e5m2_to_float},
    .from_float = {float32_from_float, float16_from_float, bfloat16_from_float, e4m3fn_from_float, e5m2_from_float},
};
