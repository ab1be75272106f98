/* What step.c and prefill.c share: the model as they see it, how its matrices are kept, threads, small arithmetic.
 *
 * A matrix [N, K] is kept in tiles of 16 rows; a tile holds, for each group of 32 columns, one block:
 *   Q4:  256 bytes of values, 16 scales, 16 minimums, both float16:  w = q * scale + minimum, q in 0..15
 *   Q8:  512 bytes of values, 16 scales:                             w = (q - 128) * scale
 *   NF4: two groups share a block: twice 256 bytes of values, 16 scales: w = NF4[q] * scale
 * Values are ordered for instructions that multiply 4 neighbouring bytes at once: byte 4r + c of the j-th 64 bytes is
 * row r, column 4j + c; with 4 bits, columns 8j + c are the lower half and 8j + 4 + c the upper half.
 *
 * Letters: M rows, N outputs, K inputs, E hidden size, F mlp size, H query heads, G kv heads, D head dim, C context.
 */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
enum { GROUP = 32, TILE = 16, AHEAD = 2048 }; /* AHEAD: bytes that are fetched before they are read */
enum { MAX_HEAD_DIM = 256, MAX_SHARED = 32 };
enum { Q4 = 4, Q8 = 8, NF4 = 40 }; /* kinds of a matrix */

typedef struct {
    int64_t rows, columns; /* multiples of 16 and 32 */
    int64_t kind;
    const uint8_t *data;
} Matrix;

typedef struct {
    const float *input_norm; /* [E] */
    Matrix qkv;
    const float *qkv_bias; /* [(H + 2G) * D] or NULL */
    Matrix out;
    const float *mlp_norm; /* [E] */
    Matrix gate_up, down;
    uint16_t *kv; /* [slots, 2, G, C, D] bfloat16 */
} Layer;

typedef struct {
    int64_t hidden, mlp, heads, kv_heads, head_dim, context, num_layers;
    float eps;
    const Layer *layers;
} Model;

/* --- threads: libgomp's own, declared here because its header may be missing ------------------------------------- */

extern int omp_get_max_threads(void);
extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);

INLINE int64_t share(int64_t items, int64_t thread, int64_t threads) { return items * thread / threads; }

/* Whether to go on, asked by one thread for all. `is_aborted` is all threads'. */
static inline int32_t is_over(int32_t (*should_abort)(void), int32_t *is_aborted) {
    if (should_abort == NULL) return 0;
#pragma omp barrier
    if (omp_get_thread_num() == 0) *is_aborted = should_abort();
#pragma omp barrier
    return *is_aborted;
}

/* --- small arithmetic, written so that the compiler makes vectors of it ------------------------------------------- */

/* e^x to 2e-7 of its value: 2^n from the exponent bits, the rest from a polynomial (Cephes' expf). NaN counts as -87. */
INLINE float fast_exp(float x) {
    x = x > -87.0f ? (x < 88.0f ? x : 88.0f) : -87.0f;
    float n = nearbyintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return p * power.f;
}

INLINE uint16_t to_bf16(float value) { /* to the nearest, ties to even; NaN stays NaN */
    union { float f; uint32_t i; } word = {value};
    if (value != value) return 0x7fc0;
    return (uint16_t)((word.i + 0x7fff + ((word.i >> 16) & 1)) >> 16);
}

INLINE int32_t is_not_finite(float value) { /* by its bits: no optimisation of sums may lose it */
    union { float f; int32_t i; } word = {value};
    return (word.i & 0x7f800000) == 0x7f800000;
}

/* [M, K] -> scaled to a root mean square of 1, times `weight`, into `out`. */
static inline void norm_row(const float *x, const float *weight, int64_t size, float eps, float *out) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    float factor = 1 / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

INLINE void rotate(const float *x, const float *rotation, int64_t head_dim, float *out) {
    for (int64_t i = 0; i < head_dim; i += 2) {
        out[i] = x[i] * rotation[i] - x[i + 1] * rotation[i + 1];
        out[i + 1] = x[i] * rotation[i + 1] + x[i + 1] * rotation[i];
    }
}

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* --- a matrix's blocks -------------------------------------------------------------------------------------------- */

/* The values of NF4 (bitsandbytes, create_normal_map). */
static const float nf4_values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

/* Bytes of a tile for one group of columns, and where in it a group's values and scales are. */
INLINE int64_t group_size(int kind) { return kind == Q4 ? 320 : kind == Q8 ? 544 : 272; }
INLINE const uint8_t *values_at(const uint8_t *tile, int64_t group, int kind) {
    return kind == NF4 ? tile + (group / 2) * 544 + (group % 2) * 256 : tile + group * group_size(kind);
}
INLINE const uint8_t *scales_at(const uint8_t *tile, int64_t group, int kind) {
    return kind == NF4 ? tile + (group / 2) * 544 + 512 : tile + group * group_size(kind) + (kind == Q4 ? 256 : 512);
}
