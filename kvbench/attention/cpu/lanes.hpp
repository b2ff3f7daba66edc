// Vectors of 32-bit lanes, and what compilers do not offer for all instruction sets alike.
//
// Arithmetic is written with the vector types that gcc and clang share; this file has what needs instructions of its
// own. A library is compiled once for each instruction set that a machine is asked for, from the same source.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvbench {

#if defined(__AVX512BW__)
constexpr int L = 16;  // lanes of a vector
constexpr int ROWS = 8;  // rows of weights that are multiplied at a time, as registers allow
#elif defined(__AVX2__)
constexpr int L = 8, ROWS = 4;
#else
constexpr int L = 4, ROWS = 4;
#endif

typedef int32_t I __attribute__((vector_size(4 * L)));   // also a pair of 16-bit numbers in each lane
typedef uint16_t H __attribute__((vector_size(4 * L)));  // the same, as 16-bit numbers
typedef float F __attribute__((vector_size(4 * L)));

template <class V, class T>
inline V load(const T *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T *to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline F splat(float x) { return F{} + x; }
inline I splat(int32_t x) { return I{} + x; }

// The bits of each 16-bit number from `shift` on, of which `mask` selects those of one code.
inline I field(I words, int shift, int mask) {
#if defined(__AVX512BW__)
    return (I)_mm512_and_si512(_mm512_srlv_epi16((__m512i)words, _mm512_set1_epi16(shift)), _mm512_set1_epi16(mask));
#elif defined(__AVX2__)
    return (I)_mm256_and_si256(_mm256_srl_epi16((__m256i)words, _mm_cvtsi32_si128(shift)), _mm256_set1_epi16(mask));
#else
    return (I)(((H)words >> (uint16_t)shift) & (uint16_t)mask);
#endif
}

// sum + a.low * b.low + a.high * b.high in each lane, of signed 16-bit numbers; exact, as no sum of a tile passes 2^31.
inline I dot(I sum, I a, I b) {
#if defined(__AVX512VNNI__)
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

inline F dot(F sum, F a, F b) { return sum + a * b; }

inline F to_float(I x) { return __builtin_convertvector(x, F); }

// The nearest whole numbers; |x| < 2^22.
inline I rounded(F x) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (I)_mm256_cvtps_epi32((__m256)x);
#else
    const F magic = splat(12582912.f);  // 1.5 * 2^23: of x + magic, the lowest bit is that of units
    return (I)(x + magic) - (I)magic;
#endif
}

// Write whole numbers of 16 bits.
inline void store_short(int16_t *to, I x) {
#if defined(__AVX512BW__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
    const __m256i packed = _mm256_packs_epi32((__m256i)x, (__m256i)x);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8)));
#else
    for (int i = 0; i < L; i++) to[i] = (int16_t)x[i];
#endif
}

// L whole numbers of 16 bits, without sign.
inline I shorts(const uint16_t *from) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    I wide;
    for (int lane = 0; lane < L; lane++) wide[lane] = from[lane];
    return wide;
#endif
}

// table[index] in each lane.
inline F gathered(const float *table, I index) {
#if defined(__AVX512BW__)
    return (F)_mm512_i32gather_ps((__m512i)index, table, 4);
#elif defined(__AVX2__)
    return (F)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
    F x;
    for (int lane = 0; lane < L; lane++) x[lane] = table[index[lane]];
    return x;
#endif
}

// The larger of two; b if one of them is NaN.
inline F larger(F a, F b) { return a > b ? a : b; }
inline F magnitude(F x) { return (F)((I)x & 0x7fffffff); }

inline float sum_of(F x) {
    float parts[L];
    store(parts, x);
    for (int half = L / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

inline float most_of(F x) {
    float parts[L];
    store(parts, x);
    for (int half = L / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
    return parts[0];
}

// 2^x for x <= 127, with a relative error of 2e-7; 0 below -126; NaN of NaN.
inline F exp2_of(F x) {
    const F bounded = larger(splat(-126.f), x);
    const I whole = rounded(bounded);
    const F f = bounded - to_float(whole);
    F y = splat(1.5403530e-4f);  // a polynomial for 2^f, |f| <= 1/2, whose exponent `whole` is then added to
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.f;
    const F result = (F)((I)y + (whole << 23));
    return x < splat(-126.f) ? F{} : result;
}

// -- 16-bit floating-point numbers ----------------------------------------------------------------------------------

enum Type { BF16, FP16, FP32, E4M3 };

inline float widened(uint16_t half) {  // fp16
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = rest << 13;
    float value;
    if (rest >= 0x7c00) bits |= 0x7f800000, std::memcpy(&value, &bits, 4);  // infinity or NaN
    else std::memcpy(&value, &bits, 4), value *= 5.192296858534828e33f;     // 2^112: fp16's bias is 15, fp32's 127
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
#endif
}

inline float brain(uint16_t half) {  // bf16
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float quarter(uint8_t code) {  // e4m3: its bits, moved to those of fp16, are the number times 2^-8
    return widened((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.f;
}

// Element `i` of numbers of a type.
inline float element(const void *from, Type type, int64_t i) {
    switch (type) {
        case BF16: return brain(((const uint16_t *)from)[i]);
        case FP16: return widened(((const uint16_t *)from)[i]);
        case E4M3: return quarter(((const uint8_t *)from)[i]);
        default: return ((const float *)from)[i];
    }
}

// L elements from number `i` on, of fp16 or fp32 or bf16.
inline F elements(const void *from, Type type, int64_t i) {
    if (type == FP32) return load<F>((const float *)from + i);
#if defined(__AVX512BW__)
    const __m256i halves = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + i));
    if (type == FP16) return (F)_mm512_cvtph_ps(halves);
    if (type == BF16) return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(__AVX2__)
    const __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + i));
    if (type == FP16) return (F)_mm256_cvtph_ps(halves);
    if (type == BF16) return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#endif
    F wide;
    for (int lane = 0; lane < L; lane++) wide[lane] = element(from, type, i + lane);
    return wide;
}

// Write a number in a type, rounded to the nearest, half to even.
inline void put(void *to, Type type, int64_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (type == FP32) {
        ((float *)to)[i] = value;
    } else if (type == BF16) {
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        ((uint16_t *)to)[i] = nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
#if defined(__F16C__)
        ((uint16_t *)to)[i] = (uint16_t)_cvtss_sh(value, 0);
#else
        const uint32_t sign = bits >> 16 & 0x8000;
        float size = value < 0 ? -value : value;
        uint16_t half;
        if (!(size == size)) half = 0x7e00;
        else if (size >= 65520.f) half = 0x7c00;
        else if (size < 6.103515625e-5f)  // subnormal: a multiple of 2^-24, rounded as in `rounded`
            half = (uint16_t)(int32_t)(size * 16777216.f + 12582912.f - 12582912.f);
        else {
            std::memcpy(&bits, &size, 4);
            bits += 0xfff + (bits >> 13 & 1);
            half = (uint16_t)((bits - 0x38000000) >> 13);  // the difference of the biases, 112, in the exponent
        }
        ((uint16_t *)to)[i] = (uint16_t)(sign | half);
#endif
    }
}

// -- transposition --------------------------------------------------------------------------------------------------

// Transpose 32-bit numbers, `rows` a multiple of 8 and `columns` one of 4: to[column][row] = from[row][column].
inline void transpose(const uint32_t *from, int64_t pitch, int rows, int columns, uint32_t *to, int64_t width) {
    for (int r = 0; r < rows; r += 8)
        for (int c = 0; c < columns; c += 4) {
#if defined(__AVX2__)
            __m256i x[4];
            for (int i = 0; i < 4; i++) {
                const uint32_t *at = from + (r + i) * pitch + c;
                x[i] = _mm256_inserti128_si256(
                    _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)at)),
                    _mm_loadu_si128((const __m128i *)(at + 4 * pitch)), 1);
            }
            const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
            const __m256i d = _mm256_unpacklo_epi32(x[2], x[3]), e = _mm256_unpackhi_epi32(x[2], x[3]);
            uint32_t *out = to + c * width + r;
            _mm256_storeu_si256((__m256i *)out, _mm256_unpacklo_epi64(a, d));
            _mm256_storeu_si256((__m256i *)(out + width), _mm256_unpackhi_epi64(a, d));
            _mm256_storeu_si256((__m256i *)(out + 2 * width), _mm256_unpacklo_epi64(b, e));
            _mm256_storeu_si256((__m256i *)(out + 3 * width), _mm256_unpackhi_epi64(b, e));
#else
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 4; j++) to[(c + j) * width + r + i] = from[(r + i) * pitch + c + j];
#endif
        }
}

}  // namespace kvbench
