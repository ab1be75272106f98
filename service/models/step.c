/* The decode step on a CPU: matrices of 4 and 8 bits times a few rows, and all layers of the causal decoder around them.
 *
 * One call computes M tokens, of different answers or of one prompt, in one parallel region: between two kernels the
 * threads meet at a barrier instead of going through Python and torch 25 times a layer. Compiled once per instruction set
 * (setup.py) and called through ctypes (native.py), so it needs neither Python's nor torch's headers. It is compiled
 * for OpenMP but not linked with it: the symbols are those of the libgomp that torch has loaded, hence one set of
 * threads, and torch.set_num_threads counts here too.
 *
 * A matrix [N, K] is kept in tiles of 16 rows; a tile holds, for each group of 32 columns, one block:
 *   Q4:  256 bytes of values, 16 scales, 16 minimums, both float16:  w = q * scale + minimum, q in 0..15
 *   Q8:  512 bytes of values, 16 scales:                             w = (q - 128) * scale
 *   NF4: two groups share a block: twice 256 bytes of values, 16 scales: w = NF4[q] * scale
 * Values are ordered for instructions that multiply 4 neighbouring bytes at once: byte 4r + c of the j-th 64 bytes is
 * row r, column 4j + c; with 4 bits, columns 8j + c are the lower half and 8j + 4 + c the upper half.
 * A product takes the 16 values of NF4 as multiples of 1 / 112.03, the unit between 60 and 127 with the least error:
 * 0.0017, where the weights of a block are around 0.4. `chatglm_unpack_nf4` gives them exactly.
 *
 * Activations are rounded twice to 8 bits, with a scale for each group of 32: to the nearest unit, and what that leaves to
 * the nearest 254th of one. So they have 15 bits, where llama.cpp's Q8_1 has 8 and bfloat16 as many. Each row's result
 * depends on that row alone: it is the same, bit for bit, in any batch and with any number of threads.
 *
 * Letters: M rows, E hidden size, F mlp size, H query heads, G kv heads, D head dim, C context.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
enum { GROUP = 32, TILE = 16, ROWS_AT_ONCE = 6, AHEAD = 2048 }; /* AHEAD: bytes that are fetched before they are read */
enum { SPAN = 256, MAX_HEAD_DIM = 256, MAX_SHARED = 32, MANY_ROWS = 6, QUERIES_AT_ONCE = 4 };
enum { Q4 = 4, Q8 = 8, NF4 = 40 }; /* kinds of a matrix */
#define NF4_UNIT 112.03f
#define FINE 254.0f /* what is left of half a unit fits into 8 bits */

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

/* Rounded activations of M rows, x = (q + fine / FINE) * scale: q and fine [M, K], and for each group its scale, the sums
 * of q and of fine, and the sum of x. */
typedef struct {
    int8_t *q, *fine;
    float *scale, *sum;
    int32_t *count, *fine_count;
} Rounded;

/* --- threads: libgomp's own, declared here because its header may be missing ------------------------------------- */

extern int omp_get_max_threads(void);
extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);

INLINE int64_t share(int64_t items, int64_t thread, int64_t threads) { return items * thread / threads; }

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

INLINE float from_bf16(uint16_t bits) {
    union { uint32_t i; float f; } word = {(uint32_t)bits << 16};
    return word.f;
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

static void round_row(const float *x, int64_t groups, int64_t at, Rounded *out) {
    int8_t *q = out->q + at * GROUP, *fine = out->fine + at * GROUP;
    for (int64_t group = at; group < at + groups; group++, x += GROUP, q += GROUP, fine += GROUP) {
        float largest = 0;
        for (int i = 0; i < GROUP; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        float unit = largest / 127, inverse = unit > 0 ? 1 / unit : 0;
        int32_t total = 0, fine_total = 0, is_bad = 0;
        for (int i = 0; i < GROUP; i++) {
            const int32_t bad = is_not_finite(x[i]);
            const float scaled = bad ? 0 : x[i] * inverse, whole = nearbyintf(scaled);
            const int32_t value = (int32_t)whole, rest = (int32_t)nearbyintf((scaled - whole) * FINE);
            q[i] = (int8_t)value;
            fine[i] = (int8_t)rest;
            total += value;
            fine_total += rest;
            is_bad |= bad;
        }
        if (is_bad) unit = NAN; /* it must reach the logits, not end as some number */
        out->scale[group] = unit;
        out->sum[group] = unit * ((float)total + (float)fine_total * (1 / FINE));
        out->count[group] = total;
        out->fine_count[group] = fine_total;
    }
}

/* [M, K] -> scaled to a root mean square of 1, times `weight`, into `out`. */
static void norm_row(const float *x, const float *weight, int64_t size, float eps, float *out) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    float factor = 1 / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

/* The values of NF4 (bitsandbytes, create_normal_map), and what a product takes for them: in units, plus 128. */
static const float nf4_values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
static const uint8_t nf4_bytes[16] = {16, 50, 69, 84, 96, 107, 118, 128, 137, 146, 156, 166, 177, 191, 209, 240};

/* --- matrix times rows ---------------------------------------------------------------------------------------------- */

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

/* Bytes of a tile for one group of columns, and where in it a group's values and scales are. */
INLINE int64_t group_size(int kind) { return kind == Q4 ? 320 : kind == Q8 ? 544 : 272; }
INLINE const uint8_t *values_at(const uint8_t *tile, int64_t group, int kind) {
    return kind == NF4 ? tile + (group / 2) * 544 + (group % 2) * 256 : tile + group * group_size(kind);
}
INLINE const uint8_t *scales_at(const uint8_t *tile, int64_t group, int kind) {
    return kind == NF4 ? tile + (group / 2) * 544 + 512 : tile + group * group_size(kind) + (kind == Q4 ? 256 : 512);
}

/* One tile times `num` rows (a constant where this is inlined) of x, from row `first` on. */
INLINE void tile_rows(const Matrix *matrix, int64_t tile, const Rounded *x, int64_t first, int num, int kind,
                      float *out, int64_t stride, int adds) {
    const int64_t groups = matrix->columns / GROUP;
    const uint8_t *start = matrix->data + tile * groups * group_size(kind);
    const float unit = kind == NF4 ? 1 / NF4_UNIT : 1;
    Lanes total[ROWS_AT_ONCE];
    for (int m = 0; m < num; m++) total[m] = lanes_zero();
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *values = values_at(start, group, kind), *scales = scales_at(start, group, kind);
        for (int i = 0; i < group_size(kind); i += 64) _mm_prefetch((const char *)values + AHEAD + i, _MM_HINT_T0);
        const Bytes bytes = kind == Q8 ? unpack8(values) : kind == Q4 ? unpack4(values) : look_up(unpack4(values));
        const Lanes scale = lanes_half(scales), minimum = kind == Q4 ? lanes_half(scales + 32) : lanes_zero();
        for (int m = 0; m < num; m++) {
            const int64_t at = (first + m) * groups + group;
            const Lanes coarse = dot(&bytes, x->q + at * GROUP, kind == Q4 ? 0 : -128 * x->count[at], kind);
            const Lanes fine = dot(&bytes, x->fine + at * GROUP, kind == Q4 ? 0 : -128 * x->fine_count[at], kind);
            const Lanes product = lanes_fma1(fine, 1 / FINE, coarse);
            total[m] = lanes_fma(lanes_scaled(product, x->scale[at] * unit), scale, total[m]);
            if (kind == Q4) total[m] = lanes_fma1(minimum, x->sum[at], total[m]);
        }
    }
    for (int m = 0; m < num; m++) {
        float *row = out + (first + m) * stride + tile * TILE;
        lanes_store(row, adds ? lanes_add(lanes_load(row), total[m]) : total[m]);
    }
}

INLINE void tile_all(const Matrix *matrix, int64_t tile, const Rounded *x, int64_t rows, int kind, float *out,
                     int64_t stride, int adds) {
    int64_t first = 0;
    for (; first + ROWS_AT_ONCE <= rows; first += ROWS_AT_ONCE)
        tile_rows(matrix, tile, x, first, ROWS_AT_ONCE, kind, out, stride, adds);
    switch (rows - first) {
        case 5: tile_rows(matrix, tile, x, first, 5, kind, out, stride, adds); break;
        case 4: tile_rows(matrix, tile, x, first, 4, kind, out, stride, adds); break;
        case 3: tile_rows(matrix, tile, x, first, 3, kind, out, stride, adds); break;
        case 2: tile_rows(matrix, tile, x, first, 2, kind, out, stride, adds); break;
        case 1: tile_rows(matrix, tile, x, first, 1, kind, out, stride, adds); break;
    }
}

/* This thread's part of x [M, K] * matrix -> out [M, N], or added to it. */
static void multiply_part(const Matrix *matrix, const Rounded *x, int64_t rows, float *out, int adds) {
    const int64_t tiles = matrix->rows / TILE, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    for (int64_t tile = share(tiles, thread, threads); tile < share(tiles, thread + 1, threads); tile++) {
        switch (matrix->kind) {
            case Q4: tile_all(matrix, tile, x, rows, Q4, out, matrix->rows, adds); break;
            case Q8: tile_all(matrix, tile, x, rows, Q8, out, matrix->rows, adds); break;
            case NF4: tile_all(matrix, tile, x, rows, NF4, out, matrix->rows, adds); break;
        }
    }
}

/* --- memory for one call -------------------------------------------------------------------------------------------- */

static size_t rounded_size(int64_t rows, int64_t columns) { return rows * (2 * columns + columns / GROUP * 16) + 64; }

static Rounded place_rounded(char *memory, int64_t rows, int64_t columns) {
    const int64_t groups = rows * columns / GROUP;
    float *floats = (float *)memory;
    int32_t *counts = (int32_t *)(floats + 2 * groups);
    int8_t *bytes = (int8_t *)(counts + 2 * groups);
    return (Rounded){bytes, bytes + groups * GROUP, floats, floats + groups, counts, counts + groups};
}

static void round_rows(const float *x, int64_t columns, int64_t from, int64_t to, Rounded *out) {
    for (int64_t m = from; m < to; m++) round_row(x + m * columns, columns / GROUP, m * (columns / GROUP), out);
}

/* x [M, K] * matrix -> out [M, N]. Returns 0, or -1 when there is no memory. */
API int chatglm_multiply(const Matrix *matrix, int64_t rows, const float *x, float *out) {
    char *memory = malloc(rounded_size(rows, matrix->columns));
    if (memory == NULL) return -1;
    Rounded rounded = place_rounded(memory, rows, matrix->columns);
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        round_rows(x, matrix->columns, share(rows, thread, threads), share(rows, thread + 1, threads), &rounded);
#pragma omp barrier
        multiply_part(matrix, &rounded, rows, out, 0);
    }
    free(memory);
    return 0;
}

/* --- NF4 as bfloat16, for a matrix product of many rows ---------------------------------------------------------------- */

#if defined(__AVX512VNNI__)
INLINE void unpack_column(const uint32_t *words, int nibble, const float *scale, uint16_t *out) {
    const __m512i index = _mm512_srli_epi32(_mm512_loadu_si512(words), 4 * nibble); /* its lowest 4 bits count */
    const __m512 value = _mm512_mul_ps(_mm512_permutexvar_ps(index, _mm512_loadu_ps(nf4_values)), _mm512_loadu_ps(scale));
    const __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#else
INLINE void unpack_column(const uint32_t *words, int nibble, const float *scale, uint16_t *out) {
    for (int r = 0; r < TILE; r++) out[r] = to_bf16(nf4_values[words[r] >> (4 * nibble) & 15] * scale[r]);
}
#endif

/* Tiles [first, first + num) of an NF4 matrix [N, K] -> bfloat16 [K, 16 * num]: transposed. */
API void chatglm_unpack_nf4(const Matrix *matrix, int64_t first, int64_t num, uint16_t *out) {
    const int64_t groups = matrix->columns / GROUP, size = groups * group_size(NF4);
#pragma omp parallel for
    for (int64_t group = 0; group < groups; group++) /* outside, so that each column is written from end to end */
        for (int64_t tile = 0; tile < num; tile++) {
            const uint8_t *start = matrix->data + (first + tile) * size;
            uint32_t words[4][TILE];
            float scale[TILE];
            memcpy(words, values_at(start, group, NF4), sizeof words);
            lanes_store(scale, lanes_half(scales_at(start, group, NF4)));
            for (int j = 0; j < 4; j++)
                for (int nibble = 0; nibble < 8; nibble++) { /* of a word: columns 0, 4, 1, 5, 2, 6, 3, 7 of eight */
                    const int64_t column = group * GROUP + 8 * j + 4 * (nibble % 2) + nibble / 2;
                    unpack_column(words[j], nibble, scale, out + (column * num + tile) * TILE);
                }
        }
}

/* --- attention ------------------------------------------------------------------------------------------------------- */

INLINE void rotate(const float *x, const float *rotation, int64_t head_dim, float *out) {
    for (int64_t i = 0; i < head_dim; i += 2) {
        out[i] = x[i] * rotation[i] - x[i + 1] * rotation[i + 1];
        out[i + 1] = x[i] * rotation[i + 1] + x[i + 1] * rotation[i];
    }
}

/* What a span of positions gives a query, in floats: the largest score, the sum of weights relative to it, and D weighted
 * values. */
enum { LARGEST, SUM, VALUES };
INLINE int64_t partial_size(const Model *model) { return model->head_dim + VALUES; }

/* 16 floats in one or two registers, whatever the instruction set. */
typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

INLINE Floats floats_of(const uint16_t *bf16) { return (Floats)(__builtin_convertvector(*(const Halves *)bf16, Words) << 16); }

INLINE float sum_of(Floats x) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
}

/* `num` queries (a constant where this is inlined), which share one kv head, times a key or times weighted values: what
 * is read is converted once for all of them, and sums stay in registers. */
INLINE void score(const float *queries, int num, const uint16_t *keys, int64_t size, int64_t count, float (*scores)[SPAN]) {
    for (int64_t at = 0; at < count; at++, keys += size) {
        Floats total[QUERIES_AT_ONCE] = {{0}};
        _mm_prefetch((const char *)(keys + 16 * size), _MM_HINT_T0);
        for (int64_t i = 0; i < size; i += 16) {
            const Floats key = floats_of(keys + i);
            for (int query = 0; query < num; query++) total[query] += *(const Floats *)(queries + query * size + i) * key;
        }
        for (int query = 0; query < num; query++) scores[query][at] = sum_of(total[query]);
    }
}
INLINE void weigh(float (*weights)[SPAN], int num, const uint16_t *values, int64_t size, int64_t count, float *out,
                  int64_t stride) {
    for (int64_t i = 0; i < size; i += 32) {
        Floats low[QUERIES_AT_ONCE] = {{0}}, high[QUERIES_AT_ONCE] = {{0}};
        for (int64_t at = 0; at < count; at++) {
            const Floats first = floats_of(values + at * size + i), second = floats_of(values + at * size + i + 16);
            for (int query = 0; query < num; query++) {
                low[query] += first * weights[query][at];
                high[query] += second * weights[query][at];
            }
        }
        for (int query = 0; query < num; query++) {
            *(Floats *)(out + query * stride + i) = low[query];
            *(Floats *)(out + query * stride + i + 16) = high[query];
        }
    }
}

/* `num` queries that share one kv head, over `count` positions, at most SPAN. */
INLINE void attend(const Model *model, const float *queries, int num, const uint16_t *keys, const uint16_t *values,
                   int64_t count, float *partials) {
    const int64_t size = model->head_dim, stride = partial_size(model);
    float scores[QUERIES_AT_ONCE][SPAN];
    score(queries, num, keys, size, count, scores);
    for (int query = 0; query < num; query++) {
        float largest = scores[query][0], sum = 0;
        int32_t is_bad = 0;
        for (int64_t i = 0; i < count; i++) {
            largest = scores[query][i] > largest ? scores[query][i] : largest;
            is_bad |= is_not_finite(scores[query][i]);
        }
        for (int64_t i = 0; i < count; i++) {
            const float weight = fast_exp(scores[query][i] - largest);
            scores[query][i] = weight;
            sum += weight;
        }
        partials[query * stride + LARGEST] = is_bad ? 0 : largest;
        partials[query * stride + SUM] = is_bad ? NAN : sum;
    }
    weigh(scores, num, values, size, count, partials + VALUES, stride);
}

/* Together, what `spans` partials, `stride` floats apart, give: D values. */
static void combine(const float *partials, int64_t spans, int64_t stride, int64_t size, float *out) {
    float largest = partials[LARGEST], sum = 0;
    for (int64_t span = 1; span < spans; span++) {
        const float other = partials[span * stride + LARGEST];
        largest = other > largest ? other : largest;
    }
    for (int64_t i = 0; i < size; i++) out[i] = 0;
    for (int64_t span = 0; span < spans; span++) {
        const float *partial = partials + span * stride;
        const float weight = fast_exp(partial[LARGEST] - largest);
        sum += weight * partial[SUM];
        for (int64_t i = 0; i < size; i++) out[i] += weight * partial[VALUES + i];
    }
    for (int64_t i = 0; i < size; i++) out[i] /= sum;
}

/* --- the step -------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Model *model;
    int64_t rows, max_spans;
    const int64_t *slots, *positions;
    const float *rotations, *query_scales;
    float *hidden, *qkv, *gate_up;
    float *partials; /* [M, spans, H, D + 2] */
    int32_t (*should_abort)(void);
    int32_t is_aborted;
} Step;

INLINE int64_t num_spans(int64_t position) { return position / SPAN + 1; }

INLINE uint16_t *keys_of(const Step *step, const Layer *layer, int64_t row, int64_t kv_head) {
    const Model *model = step->model;
    return layer->kv + (step->slots[row] * 2 * model->kv_heads + kv_head) * model->context * model->head_dim;
}
INLINE uint16_t *values_of(const Step *step, const Layer *layer, int64_t row, int64_t kv_head) {
    const Model *model = step->model;
    return keys_of(step, layer, row, kv_head) + model->kv_heads * model->context * model->head_dim;
}
INLINE const float *qkv_of(const Step *step, int64_t row, int64_t head) {
    const Model *model = step->model;
    return step->qkv + (row * (model->heads + 2 * model->kv_heads) + head) * model->head_dim;
}

/* This thread's part of the rows' new keys and values. */
static void write_part(const Step *step, const Layer *layer) {
    const Model *model = step->model;
    const int64_t size = model->head_dim, tasks = step->rows * model->kv_heads;
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    for (int64_t task = share(tasks, thread, threads); task < share(tasks, thread + 1, threads); task++) {
        const int64_t row = task / model->kv_heads, kv_head = task % model->kv_heads, at = step->positions[row] * size;
        const float *value = qkv_of(step, row, model->heads + model->kv_heads + kv_head);
        float key[MAX_HEAD_DIM];
        rotate(qkv_of(step, row, model->heads + kv_head), step->rotations + row * size, size, key);
        uint16_t *new_key = keys_of(step, layer, row, kv_head) + at, *new_value = values_of(step, layer, row, kv_head) + at;
        for (int64_t i = 0; i < size; i++) new_key[i] = to_bf16(key[i]);
        for (int64_t i = 0; i < size; i++) new_value[i] = to_bf16(value[i]);
    }
}

/* A row's kv head, one span of positions. */
static void attend_task(const Step *step, const Layer *layer, int64_t row, int64_t kv_head, int64_t span) {
    const Model *model = step->model;
    const int64_t size = model->head_dim, shared = model->heads / model->kv_heads, position = step->positions[row];
    const int64_t end = span + 1 == num_spans(position) ? position + 1 : (span + 1) * SPAN;
    float queries[MAX_SHARED * MAX_HEAD_DIM];
    const float factor = (step->query_scales ? step->query_scales[row] : 1.0f) / sqrtf((float)size);
    for (int64_t query = 0; query < shared; query++) {
        float *rotated = queries + query * size;
        rotate(qkv_of(step, row, kv_head * shared + query), step->rotations + row * size, size, rotated);
        for (int64_t i = 0; i < size; i++) rotated[i] *= factor;
    }
    float *partials = step->partials
                      + ((row * step->max_spans + span) * model->heads + kv_head * shared) * partial_size(model);
    const uint16_t *keys = keys_of(step, layer, row, kv_head) + span * SPAN * size;
    const uint16_t *values = values_of(step, layer, row, kv_head) + span * SPAN * size;
    const int64_t count = end - span * SPAN, stride = partial_size(model);
    int64_t query = 0;
    for (; query + 4 <= shared; query += 4)
        attend(model, queries + query * size, 4, keys, values, count, partials + query * stride);
    switch (shared - query) {
        case 3: attend(model, queries + query * size, 3, keys, values, count, partials + query * stride); break;
        case 2: attend(model, queries + query * size, 2, keys, values, count, partials + query * stride); break;
        case 1: attend(model, queries + query * size, 1, keys, values, count, partials + query * stride); break;
    }
}

/* This thread's part of all rows, kv heads and spans. */
static void attend_part(const Step *step, const Layer *layer) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int64_t tasks = 0, task = 0;
    for (int64_t row = 0; row < step->rows; row++) tasks += num_spans(step->positions[row]) * step->model->kv_heads;
    const int64_t from = share(tasks, thread, threads), to = share(tasks, thread + 1, threads);
    for (int64_t row = 0; row < step->rows; row++)
        for (int64_t kv_head = 0; kv_head < step->model->kv_heads; kv_head++)
            for (int64_t span = 0; span < num_spans(step->positions[row]); span++, task++)
                if (task >= from && task < to) attend_task(step, layer, row, kv_head, span);
}

/* What comes before a matrix, the same for all its rows. With few rows each thread computes all of it for itself, in
 * memory of its own: that takes less than a barrier. With many, each computes some, in memory of all. */
typedef struct {
    float *wide;
    Rounded rounded;
    int64_t from, to; /* rows */
    int is_shared;
} Before;

static void round_before(Before *before, int64_t columns) {
    round_rows(before->wide, columns, before->from, before->to, &before->rounded);
    if (before->is_shared) {
#pragma omp barrier
    }
}

static void norm_before(const Step *step, Before *before, const float *weight) {
    const int64_t hidden = step->model->hidden;
    for (int64_t row = before->from; row < before->to; row++)
        norm_row(step->hidden + row * hidden, weight, hidden, step->model->eps, before->wide + row * hidden);
    round_before(before, hidden);
}

static void run_layer(const Step *step, const Layer *layer, Before *before) {
    const Model *model = step->model;
    const int64_t mlp = model->mlp, size = model->head_dim, attended = model->heads * size;
    norm_before(step, before, layer->input_norm);
    multiply_part(&layer->qkv, &before->rounded, step->rows, step->qkv, 0);
#pragma omp barrier
    if (layer->qkv_bias != NULL) {
#pragma omp for
        for (int64_t row = 0; row < step->rows; row++)
            for (int64_t i = 0; i < layer->qkv.rows; i++) step->qkv[row * layer->qkv.rows + i] += layer->qkv_bias[i];
    }
    write_part(step, layer);
#pragma omp barrier
    attend_part(step, layer);
#pragma omp barrier
    for (int64_t row = before->from; row < before->to; row++)
        for (int64_t head = 0; head < model->heads; head++)
            combine(step->partials + (row * step->max_spans * model->heads + head) * partial_size(model),
                    num_spans(step->positions[row]), model->heads * partial_size(model), size,
                    before->wide + row * attended + head * size);
    round_before(before, attended);
    multiply_part(&layer->out, &before->rounded, step->rows, step->hidden, 1);
#pragma omp barrier
    norm_before(step, before, layer->mlp_norm);
    multiply_part(&layer->gate_up, &before->rounded, step->rows, step->gate_up, 0);
#pragma omp barrier
    for (int64_t row = before->from; row < before->to; row++) {
        const float *gate = step->gate_up + row * 2 * mlp, *up = gate + mlp;
        for (int64_t i = 0; i < mlp; i++) before->wide[row * mlp + i] = gate[i] / (1 + fast_exp(-gate[i])) * up[i];
    }
    round_before(before, mlp);
    multiply_part(&layer->down, &before->rounded, step->rows, step->hidden, 1);
#pragma omp barrier
}

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Whether to go on, asked by one thread for all. */
static int32_t is_over(Step *step) {
    if (step->should_abort == NULL) return 0;
#pragma omp barrier
    if (omp_get_thread_num() == 0) step->is_aborted = step->should_abort();
#pragma omp barrier
    return step->is_aborted;
}

/* One token for each of M rows: hidden [M, E] goes in as embeddings and comes out after the last layer. Row m is in slot
 * slots[m] at positions[m], and sees all positions of its slot up to its own, also those that this step writes: several
 * tokens of one prompt may be in it. rotations [M, D] are (cos, sin) of its pairs; query_scales [M] or NULL.
 * should_abort, or NULL, is asked before each layer.
 * Returns 0; 1 when it was aborted; -1 when there is no memory: nothing was changed then. */
API int chatglm_step(const Model *model, int64_t rows, const int64_t *slots, const int64_t *positions,
                     const float *rotations, const float *query_scales, float *hidden, int32_t (*should_abort)(void)) {
    int64_t last = 0;
    for (int64_t row = 0; row < rows; row++) last = larger(last, positions[row]);
    Step step = {model, rows, num_spans(last), slots, positions, rotations, query_scales, hidden, NULL, NULL, NULL,
                 should_abort, 0};
    const int64_t qkv = rows * (model->heads + 2 * model->kv_heads) * model->head_dim;
    const int64_t partials = rows * step.max_spans * model->heads * partial_size(model);
    const int64_t widest = larger(larger(model->hidden, model->mlp), model->heads * model->head_dim);
    const size_t shared = (sizeof(float) * (qkv + rows * 2 * model->mlp + partials) + 63) / 64 * 64;
    const size_t own = (sizeof(float) * rows * widest + rounded_size(rows, widest) + 127) / 64 * 64;
    char *memory = malloc(shared + own * omp_get_max_threads());
    if (memory == NULL) return -1;
    step.qkv = (float *)memory;
    step.gate_up = step.qkv + qkv;
    step.partials = step.gate_up + rows * 2 * model->mlp;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int is_shared = rows >= MANY_ROWS;
        Before before = {.wide = (float *)(memory + shared + (is_shared ? 0 : own * thread)), .is_shared = is_shared};
        before.rounded = place_rounded((char *)(before.wide + rows * widest), rows, widest);
        before.from = is_shared ? share(rows, thread, threads) : 0;
        before.to = is_shared ? share(rows, thread + 1, threads) : rows;
        for (int64_t i = 0; i < model->num_layers && !is_over(&step); i++) run_layer(&step, model->layers + i, &before);
    }
    free(memory);
    return step.is_aborted;
}
