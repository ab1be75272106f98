/* Vectors of one value for each of a tile's 16 rows, and a block's values, in AVX-512 and in AVX2. */
#pragma once

#include "step.h"

/* What a product takes for the values of NF4: in units, plus 128. */
#define NF4_UNIT 112.03f
static const uint8_t nf4_bytes[16] = {16, 50, 69, 84, 96, 107, 118, 128, 137, 146, 156, 166, 177, 191, 209, 240};

#if defined(__AVX512VNNI__)

typedef __m512 Lanes; /* one value for each row of a tile */
INLINE Lanes lanes_zero(void) { return _mm512_setzero_ps(); }
INLINE Lanes lanes_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE Lanes lanes_fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Lanes lanes_scaled(Lanes a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
INLINE Lanes lanes_fma1(Lanes a, float b, Lanes c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
INLINE Lanes lanes_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE Lanes lanes_add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
INLINE void lanes_store(float *p, Lanes a) { _mm512_storeu_ps(p, a); }

typedef struct { __m512i part[8]; } Bytes; /* a block's values: part j holds columns 4j..4j+3 of 16 rows */
INLINE Bytes unpack4(const uint8_t *block) {
    Bytes bytes;
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(block + 64 * j);
        bytes.part[2 * j] = _mm512_and_si512(both, low);
        bytes.part[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    return bytes;
}
INLINE Bytes unpack8(const uint8_t *block) {
    Bytes bytes;
    for (int j = 0; j < 8; j++) bytes.part[j] = _mm512_loadu_si512(block + 64 * j);
    return bytes;
}
INLINE Bytes look_up(Bytes bytes) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)nf4_bytes));
    for (int j = 0; j < 8; j++) bytes.part[j] = _mm512_shuffle_epi8(table, bytes.part[j]);
    return bytes;
}
INLINE Lanes dot(const Bytes *bytes, const int8_t *x, int32_t start, int kind) {
    (void)kind;
    __m512i total = _mm512_set1_epi32(start);
    for (int j = 0; j < 8; j++) {
        int32_t four;
        memcpy(&four, x + 4 * j, 4);
        total = _mm512_dpbusd_epi32(total, bytes->part[j], _mm512_set1_epi32(four));
    }
    return _mm512_cvtepi32_ps(total);
}

#else /* AVX2: the same in two halves of 8 rows */

typedef struct { __m256 a, b; } Lanes;
INLINE Lanes lanes_zero(void) { return (Lanes){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Lanes lanes_half(const uint8_t *p) {
    return (Lanes){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
INLINE Lanes lanes_fma(Lanes a, Lanes b, Lanes c) {
    return (Lanes){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
INLINE Lanes lanes_scaled(Lanes a, float b) {
    return (Lanes){_mm256_mul_ps(a.a, _mm256_set1_ps(b)), _mm256_mul_ps(a.b, _mm256_set1_ps(b))};
}
INLINE Lanes lanes_fma1(Lanes a, float b, Lanes c) {
    return lanes_fma(a, (Lanes){_mm256_set1_ps(b), _mm256_set1_ps(b)}, c);
}
INLINE Lanes lanes_load(const float *p) { return (Lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE Lanes lanes_add(Lanes a, Lanes b) { return (Lanes){_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
INLINE void lanes_store(float *p, Lanes a) {
    _mm256_storeu_ps(p, a.a);
    _mm256_storeu_ps(p + 8, a.b);
}

typedef struct { __m256i part[16]; } Bytes; /* part 2j: rows 0-7, part 2j + 1: rows 8-15 */
INLINE Bytes unpack4(const uint8_t *block) {
    Bytes bytes;
    const __m256i low = _mm256_set1_epi8(15);
    for (int j = 0; j < 8; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(block + 32 * j));
        int first = 4 * (j / 2) + j % 2;
        bytes.part[first] = _mm256_and_si256(both, low);
        bytes.part[first + 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    return bytes;
}
INLINE Bytes unpack8(const uint8_t *block) {
    Bytes bytes;
    for (int j = 0; j < 16; j++) bytes.part[j] = _mm256_loadu_si256((const __m256i *)(block + 32 * j));
    return bytes;
}
INLINE Bytes look_up(Bytes bytes) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)nf4_bytes));
    for (int j = 0; j < 16; j++) bytes.part[j] = _mm256_shuffle_epi8(table, bytes.part[j]);
    return bytes;
}
INLINE __m256i dot_four(__m256i w, __m256i x, int kind) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (kind == Q4) return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones); /* 2 * 15 * 127 fits 16 bits */
    /* 8 bits would not fit: the even and the odd columns apart */
    __m256i w_even = _mm256_and_si256(w, _mm256_set1_epi16(255)), w_odd = _mm256_srli_epi16(w, 8);
    __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
    return _mm256_add_epi32(_mm256_madd_epi16(w_even, x_even), _mm256_madd_epi16(w_odd, x_odd));
}
INLINE Lanes dot(const Bytes *bytes, const int8_t *x, int32_t start, int kind) {
    __m256i a = _mm256_set1_epi32(start), b = a;
    for (int j = 0; j < 8; j++) {
        int32_t four;
        memcpy(&four, x + 4 * j, 4);
        __m256i columns = _mm256_set1_epi32(four);
        a = _mm256_add_epi32(a, dot_four(bytes->part[2 * j], columns, kind));
        b = _mm256_add_epi32(b, dot_four(bytes->part[2 * j + 1], columns, kind));
    }
    return (Lanes){_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
}

#endif
