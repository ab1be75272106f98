/* A prompt on a CPU with AMX: all layers of the causal decoder, for many tokens of one slot.
 *
 * Weights are unpacked a few thousand at a time, to bfloat16, into memory that stays in the first cache, and multiplied by
 * all rows from there: so a chunk reads 4 bits a weight, where a matrix product of torch's reads 16 and reorders them.
 * Activations, keys, values and attention weights are rounded to bfloat16 for a product; sums, norms, residuals and the
 * softmax are float32. Each token's result depends on what it sees alone: it is the same, bit for bit, however its
 * prompt is cut into chunks, and with any number of threads.
 *
 * A tile register holds 16 rows of 64 bytes. A product takes A, 16 rows x 32 columns of bfloat16, and B, 16 pairs of rows
 * x 16 columns x the two of a pair, and adds A B to 16 x 16 floats. Activations (A) and weights (B) are kept in such tiles.
 * Attention is computed transposed, keys x queries: so keys are read as they lie in the slot, the softmax of 16 queries is
 * one of vectors, and its weights leave it in the order of B.
 */
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.h"

enum {
    CELLS = 512,      /* bfloat16 values of a tile register */
    SIDE = 2 * TILE,   /* of a block of 2 x 2 tiles */
    DEPTH = 20,        /* groups of columns at once: 40 kB of a SIDE of activations, which stay in the first cache */
    UNITS = 4,         /* SIDEs of weights at once: 160 kB, which stay in the second */
    ROWS = 256,        /* activations at once: 128 kB of sums */
    KEYS = 256,        /* a span of attention */
};

/* --- tile registers: 0 to 3 are sums [A tile][B tile], 4 and 5 A, 6 and 7 B ------------------------------------------------ */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

/* Whether this process may use the tile registers: the kernel wants to be asked (ARCH_REQ_XCOMP_PERM, XTILEDATA). */
API int chatglm_can_prefill(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static void take_tiles(TileConfig *before) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    _tile_storeconfig(before);
    _tile_loadconfig(&config);
}

static void leave_tiles(const TileConfig *before) { /* another library may believe that its own is still set */
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

/* GCC does not know that tile loads read memory. */
#define BEFORE_TILE_LOADS() __asm__ volatile("" ::: "memory")

typedef struct { /* where a chain of products finds its tiles: distances in values, `stride` in bytes */
    const uint16_t *data;
    int64_t next, second, stride;
} Chain;

/* sums [SIDE, SIDE] = or += A B over `depth` tiles, of one or two tiles of A (`two_a`) and of B. */
INLINE void multiply_chain(Chain a, Chain b, int64_t depth, int two_a, int two_b, int adds, float *sums) {
    enum { STRIDE = SIDE * sizeof(float) };
    if (adds) {
        _tile_loadd(0, sums, STRIDE);
        if (two_b) _tile_loadd(1, sums + TILE, STRIDE);
        if (two_a) _tile_loadd(2, sums + TILE * SIDE, STRIDE);
        if (two_a && two_b) _tile_loadd(3, sums + TILE * SIDE + TILE, STRIDE);
    } else {
        _tile_zero(0);
        if (two_b) _tile_zero(1);
        if (two_a) _tile_zero(2);
        if (two_a && two_b) _tile_zero(3);
    }
    for (int64_t i = 0; i < depth; i++) {
        const uint16_t *a_tile = a.data + i * a.next, *b_tile = b.data + i * b.next;
        _tile_loadd(6, b_tile, b.stride);
        _tile_loadd(4, a_tile, a.stride);
        _tile_dpbf16ps(0, 4, 6);
        if (two_b) {
            _tile_loadd(7, b_tile + b.second, b.stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_a) {
            _tile_loadd(5, a_tile + a.second, a.stride);
            _tile_dpbf16ps(2, 5, 6);
            if (two_b) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, STRIDE);
    if (two_b) _tile_stored(1, sums + TILE, STRIDE);
    if (two_a) _tile_stored(2, sums + TILE * SIDE, STRIDE);
    if (two_a && two_b) _tile_stored(3, sums + TILE * SIDE + TILE, STRIDE);
    BEFORE_TILE_LOADS(); /* and before what reads the sums */
}

INLINE void multiply_block(Chain a, Chain b, int64_t depth, int two_a, int two_b, int adds, float *sums) {
    BEFORE_TILE_LOADS();
    if (two_a && two_b)
        multiply_chain(a, b, depth, 1, 1, adds, sums);
    else if (two_a)
        multiply_chain(a, b, depth, 1, 0, adds, sums);
    else if (two_b)
        multiply_chain(a, b, depth, 0, 1, adds, sums);
    else
        multiply_chain(a, b, depth, 0, 0, adds, sums);
}

/* --- small arithmetic -------------------------------------------------------------------------------------------------- */

/* fast_exp of 16, but NaN stays NaN. */
INLINE __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87), x); /* the second operand where one is NaN */
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1)));
    return _mm512_scalef_ps(p, n);
}

/* The first of each of 16 lines, `size` apart. */
INLINE __m512i lines_of(int size) {
    return _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(size));
}

INLINE void store_bf16(uint16_t *out, __m512 x) { _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(x)); }

/* 16 words, each of the two values as bfloat16: a row of B. The nearest, ties up: 4 instructions that many ports take,
 * where those for it wait for one. */
INLINE __m512i pairs_of(__m512 first, __m512 second) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
    const __m512i high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(second), half), upper);
    return _mm512_or_si512(low, high);
}

/* --- matrix times many rows ---------------------------------------------------------------------------------------------- */

typedef struct { /* activations [M, K] in tiles of A, row after row of them */
    uint16_t *data;
    int64_t columns;
} Packed;

/* Tiles from one row of them to the next: an odd number, or with 4,096 columns all rows would share one place in a cache. */
INLINE int64_t packed_stride(int64_t columns) { return columns / GROUP | 1; }
INLINE size_t packed_size(int64_t rows, int64_t columns) {
    return sizeof(uint16_t) * CELLS * packed_stride(columns) * ((rows + SIDE - 1) / SIDE * 2);
}
INLINE uint16_t *packed_at(const Packed *x, int64_t row, int64_t column) { /* `column`: a multiple of 16 */
    const int64_t tile = row / TILE * packed_stride(x->columns) + column / GROUP;
    return x->data + tile * CELLS + row % TILE * GROUP + column % GROUP;
}
INLINE void pack_row(const float *values, int64_t row, Packed *x) {
    for (int64_t i = 0; i < x->columns; i += 16) store_bf16(packed_at(x, row, i), _mm512_loadu_ps(values + i));
}

typedef struct { /* what becomes of a product. GATED: silu(first half of its columns) * second half, packed */
    enum { STORED, ADDED, ROUNDED, GATED } kind;
    float *out;        /* [M, N] */
    uint16_t *rounded; /* [M, N] bfloat16 */
    Packed *packed;
} Target;

typedef struct { /* one thread's memory */
    uint16_t weights[2 * UNITS * DEPTH * CELLS], queries[2 * MAX_HEAD_DIM * TILE], attention[KEYS * SIDE];
    float sums[ROWS * UNITS * SIDE], scores[KEYS * SIDE], values[MAX_HEAD_DIM * SIDE];
} __attribute__((aligned(64))) Bench;

/* A block's 4 columns of 16 rows, from the 4 bytes of each row. */
INLINE void unpack_columns(__m512i bytes, __m512 scale, __m512 minimum, int kind, __m512 *columns) {
    if (kind == Q4) { /* 0x4300 | q is 128 + q as bfloat16: cheaper than to convert, and `minimum` makes up for it */
        const __m512i evens = _mm512_set4_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000);
        const __m512i odds = _mm512_set4_epi32(0x800f800e, 0x800b800a, 0x80078006, 0x80038002);
        const __m512i with = _mm512_set1_epi32(0x43004300), upper = _mm512_set1_epi32((int)0xffff0000);
        for (int i = 0; i < 4; i += 2) {
            const __m512i two = _mm512_or_si512(_mm512_shuffle_epi8(bytes, i ? odds : evens), with);
            columns[i] = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16));
            columns[i + 1] = _mm512_castsi512_ps(_mm512_and_si512(two, upper));
        }
        for (int i = 0; i < 4; i++) columns[i] = _mm512_fmadd_ps(columns[i], scale, minimum);
        return;
    }
    const __m512 table = _mm512_loadu_ps(nf4_values);
    for (int i = 0; i < 4; i++) {
        const __m512i value = _mm512_srli_epi32(bytes, 8 * i), byte = _mm512_and_si512(value, _mm512_set1_epi32(255));
        columns[i] = kind == NF4 ? _mm512_mul_ps(_mm512_permutexvar_ps(value, table), scale) /* its lowest 4 bits count */
                                 : _mm512_fmadd_ps(_mm512_cvtepi32_ps(byte), scale, minimum);
    }
}

/* A tile's weights in groups [from, to) -> as many tiles of B. */
INLINE void unpack_tile(const Matrix *matrix, int64_t tile, int64_t from, int64_t to, int kind, uint16_t *out) {
    const uint8_t *start = matrix->data + tile * (matrix->columns / GROUP) * group_size(kind);
    for (int64_t group = from; group < to; group++, out += CELLS) {
        const uint8_t *values = values_at(start, group, kind), *scales = scales_at(start, group, kind);
        for (int i = 0; i < group_size(kind); i += 64) _mm_prefetch((const char *)values + AHEAD + i, _MM_HINT_T0);
        const Bytes bytes = kind == Q8 ? unpack8(values) : unpack4(values);
        const __m512 scale = lanes_half(scales), zero = kind == Q4 ? lanes_half(scales + 32) : _mm512_setzero_ps();
        const __m512 minimum = _mm512_fnmadd_ps(scale, _mm512_set1_ps(128), zero);
        for (int j = 0; j < 8; j++) {
            __m512 columns[4];
            unpack_columns(bytes.part[j], scale, minimum, kind, columns);
            for (int i = 0; i < 2; i++)
                _mm512_store_si512(out + 64 * j + 32 * i, pairs_of(columns[2 * i], columns[2 * i + 1]));
        }
    }
}
static void unpack_tiles(const Matrix *matrix, int64_t tile, int64_t from, int64_t to, uint16_t *out) {
    switch (matrix->kind) {
        case Q4: unpack_tile(matrix, tile, from, to, Q4, out); break;
        case Q8: unpack_tile(matrix, tile, from, to, Q8, out); break;
        case NF4: unpack_tile(matrix, tile, from, to, NF4, out); break;
    }
}

/* A unit is two tiles of a matrix: neighbours, or with GATED a tile of the first half and its twin in the second. */
INLINE int64_t num_units(const Matrix *matrix, const Target *target) {
    return target->kind == GATED ? matrix->rows / SIDE : (matrix->rows + TILE) / SIDE;
}
INLINE int64_t tile_of(const Matrix *matrix, const Target *target, int64_t unit, int which) {
    return target->kind == GATED ? unit + which * num_units(matrix, target) : 2 * unit + which;
}
INLINE int has_two(const Matrix *matrix, const Target *target, int64_t unit) {
    return tile_of(matrix, target, unit, 1) < matrix->rows / TILE;
}

INLINE void store_sums(const Target *target, int64_t at, __m512 sums) {
    switch (target->kind) {
        case STORED: _mm512_storeu_ps(target->out + at, sums); break;
        case ADDED: _mm512_storeu_ps(target->out + at, _mm512_add_ps(_mm512_loadu_ps(target->out + at), sums)); break;
        case ROUNDED: store_bf16(target->rounded + at, sums); break;
        case GATED: break;
    }
}

/* What `num` rows from `row` on get of a unit's sums. */
static void finish(const Matrix *matrix, const Target *target, const float *sums, int64_t row, int64_t num, int64_t unit) {
    const int64_t column = tile_of(matrix, target, unit, 0) * TILE;
    for (int64_t m = row; m < row + num; m++, sums += SIDE) {
        const __m512 first = _mm512_loadu_ps(sums), second = _mm512_loadu_ps(sums + TILE);
        if (target->kind == GATED) {
            const __m512 one = _mm512_set1_ps(1), decay = exp16(_mm512_sub_ps(_mm512_setzero_ps(), first));
            const __m512 gated = _mm512_mul_ps(_mm512_div_ps(first, _mm512_add_ps(one, decay)), second);
            store_bf16(packed_at(target->packed, m, column), gated);
            continue;
        }
        const int64_t at = m * matrix->rows + column;
        store_sums(target, at, first);
        if (has_two(matrix, target, unit)) store_sums(target, at + TILE, second);
    }
}

/* Units [from, to), at most UNITS, of rows [first, last), at most ROWS. */
static void multiply_units(const Matrix *matrix, int64_t from, int64_t to, const Packed *x, int64_t first, int64_t last,
                           const Target *target, Bench *bench) {
    const int64_t groups = matrix->columns / GROUP, steps = (groups + DEPTH - 1) / DEPTH;
    for (int64_t step = 0; step < steps; step++) {
        const int64_t start = share(groups, step, steps), end = share(groups, step + 1, steps);
        for (int64_t unit = from; unit < to; unit++)
            for (int which = 0; which <= has_two(matrix, target, unit); which++)
                unpack_tiles(matrix, tile_of(matrix, target, unit, which), start, end,
                             bench->weights + (2 * (unit - from) + which) * DEPTH * CELLS);
        for (int64_t row = first; row < last; row += SIDE) {
            const Chain a = {packed_at(x, row, start * GROUP), CELLS, packed_stride(x->columns) * CELLS, 64};
            float *sums = bench->sums + (row - first) * UNITS * SIDE;
            for (int64_t unit = from; unit < to; unit++) {
                const Chain b = {bench->weights + 2 * (unit - from) * DEPTH * CELLS, CELLS, DEPTH * CELLS, 64};
                multiply_block(a, b, end - start, row + TILE < last, has_two(matrix, target, unit), step > 0,
                               sums + (unit - from) * SIDE * SIDE);
            }
            for (int64_t unit = from; unit < to && step + 1 == steps; unit++)
                finish(matrix, target, sums + (unit - from) * SIDE * SIDE, row, last - row < SIDE ? last - row : SIDE, unit);
        }
    }
}

/* This thread's units of x [M, K] * matrix, rows [first, last); `first` is a multiple of 16. */
static void multiply_part(const Matrix *matrix, const Packed *x, int64_t first, int64_t last, Target target, Bench *bench) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), units = num_units(matrix, &target);
    const int64_t from = share(units, thread, threads), num = share(units, thread + 1, threads) - from;
    const int64_t blocks = (num + UNITS - 1) / UNITS;
    for (int64_t row = first; row < last; row += ROWS)
        for (int64_t block = 0; block < blocks; block++)
            multiply_units(matrix, from + share(num, block, blocks), from + share(num, block + 1, blocks), x, row,
                           row + ROWS < last ? row + ROWS : last, &target, bench);
}

/* x [M, K] * matrix -> out [M, N], both bfloat16. Returns 0, or -1 when there is no memory. */
API int chatglm_multiply_many(const Matrix *matrix, int64_t rows, const uint16_t *x, uint16_t *out) {
    const size_t own = sizeof(Bench), shared = (packed_size(rows, matrix->columns) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, shared + own * omp_get_max_threads());
    if (memory == NULL) return -1;
    Packed packed = {(uint16_t *)memory, matrix->columns};
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        TileConfig before;
        take_tiles(&before);
        for (int64_t row = share(rows, thread, threads); row < share(rows, thread + 1, threads); row++)
            for (int64_t i = 0; i < matrix->columns; i += GROUP)
                memcpy(packed_at(&packed, row, i), x + row * matrix->columns + i, GROUP * sizeof *x);
#pragma omp barrier
        multiply_part(matrix, &packed, 0, rows, (Target){.kind = ROUNDED, .rounded = out},
                      (Bench *)(memory + shared + own * thread));
        leave_tiles(&before);
    }
    free(memory);
    return 0;
}

/* --- a prompt ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Model *model;
    int64_t rows, slot, start;
    const float *rotations, *query_scales;
    float *hidden, *qkv;
    Packed normed, attended, gated;
    uint16_t *values; /* the slot's values, transposed: [G, (start + M) / 32, D, 32] */
    int32_t is_aborted;
} Prompt;

INLINE int64_t num_value_tiles(const Prompt *prompt) { return (prompt->start + prompt->rows + GROUP - 1) / GROUP; }
INLINE uint16_t *kv_of(const Prompt *prompt, const Layer *layer, int is_value, int64_t kv_head) {
    const Model *model = prompt->model;
    return layer->kv + ((prompt->slot * 2 + is_value) * model->kv_heads + kv_head) * model->context * model->head_dim;
}

static void norm_rows(const Prompt *prompt, const float *weight, int64_t from, int64_t to, float *room, Packed *out) {
    const int64_t hidden = prompt->model->hidden;
    for (int64_t row = from; row < to; row++) {
        norm_row(prompt->hidden + row * hidden, weight, hidden, prompt->model->eps, room);
        pack_row(room, row, out);
    }
}

/* A row's queries, keys and values: biased, turned, the queries scaled for attention, the others written to the slot. */
static void place_row(const Prompt *prompt, const Layer *layer, int64_t row) {
    const Model *model = prompt->model;
    const int64_t size = model->head_dim, rotating = model->heads + model->kv_heads, all = rotating + model->kv_heads;
    const float factor = (prompt->query_scales ? prompt->query_scales[row] : 1.0f) / sqrtf((float)size);
    float *heads = prompt->qkv + row * all * size, turned[MAX_HEAD_DIM];
    if (layer->qkv_bias != NULL)
        for (int64_t i = 0; i < all * size; i++) heads[i] += layer->qkv_bias[i];
    for (int64_t head = 0; head < rotating; head++) {
        rotate(heads + head * size, prompt->rotations + row * size, size, turned);
        for (int64_t i = 0; i < size; i++) heads[head * size + i] = turned[i] * (head < model->heads ? factor : 1);
    }
    for (int64_t head = model->heads; head < all; head++) {
        const int is_value = head >= rotating;
        uint16_t *out = kv_of(prompt, layer, is_value, head - (is_value ? rotating : model->heads));
        out += (prompt->start + row) * size;
        for (int64_t i = 0; i < size; i += 16) store_bf16(out + i, _mm512_loadu_ps(heads + head * size + i));
    }
}

/* 32 positions of a kv head's values -> [D, 32], zeros after the end of the prompt. */
static void transpose_values(const Prompt *prompt, const Layer *layer, int64_t kv_head, int64_t tile) {
    const int64_t size = prompt->model->head_dim, end = prompt->start + prompt->rows;
    const uint16_t *values = kv_of(prompt, layer, 1, kv_head);
    uint32_t *out = (uint32_t *)(prompt->values + (kv_head * num_value_tiles(prompt) + tile) * GROUP * size);
    for (int64_t pair = 0; pair < GROUP / 2; pair++) {
        const int64_t at = tile * GROUP + 2 * pair;
        for (int64_t i = 0; i < size; i += 16) {
            __m512i word = _mm512_setzero_si512();
            if (at < end) word = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(values + at * size + i)));
            if (at + 1 < end) {
                const __m256i odd = _mm256_loadu_si256((const __m256i *)(values + (at + 1) * size + i));
                word = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
            }
            _mm512_i32scatter_epi32(out + i * (GROUP / 2) + pair, lines_of(GROUP / 2), word, 4);
        }
    }
}

typedef struct { /* of 16 queries: how many positions they see, and what is known of their softmax */
    __m512i seen;
    __m512 largest, sum;
} Softmax;

/* Scores of `count` keys from `at` on, [count, SIDE] with these 16 queries in columns -> weights relative to the largest
 * score so far, as tiles of B [count / 32][CELLS]. Returns what everything before is to be multiplied with. `hides`: not
 * every query sees every key (a constant where this is inlined). A score that is not finite makes the sum NaN. */
INLINE __m512 weigh_some(Softmax *softmax, const float *scores, int64_t at, int64_t count, int hides, uint16_t *out) {
    __m512 largest = softmax->largest;
    for (int64_t key = 0; key < count; key++) {
        const __mmask16 sees = hides ? _mm512_cmplt_epi32_mask(_mm512_set1_epi32((int)(at + key)), softmax->seen) : 0xffff;
        largest = _mm512_mask_max_ps(largest, sees, largest, _mm512_loadu_ps(scores + key * SIDE));
    }
    const __m512 decay = at > 0 ? exp16(_mm512_sub_ps(softmax->largest, largest)) : _mm512_setzero_ps();
    __m512 sums[2] = {_mm512_mul_ps(softmax->sum, decay), _mm512_setzero_ps()};
    for (int64_t key = 0; key < count; key += 2) {
        __m512 weight[2];
        for (int i = 0; i < 2; i++) {
            weight[i] = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + (key + i) * SIDE), largest));
            if (hides) {
                const __m512i place = _mm512_set1_epi32((int)(at + key + i));
                weight[i] = _mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask(place, softmax->seen), weight[i]);
            }
            sums[i] = _mm512_add_ps(sums[i], weight[i]);
        }
        _mm512_storeu_si512(out + key / GROUP * CELLS + key % GROUP * TILE, pairs_of(weight[0], weight[1]));
    }
    softmax->largest = largest;
    softmax->sum = _mm512_add_ps(sums[0], sums[1]);
    return decay;
}
static __m512 weigh(Softmax *softmax, const float *scores, int64_t at, int64_t count, int hides, uint16_t *out) {
    return hides ? weigh_some(softmax, scores, at, count, 1, out) : weigh_some(softmax, scores, at, count, 0, out);
}

/* 32 queries of one kv head, the `block`-th: of its heads' queries row by row. */
static void attend_block(Prompt *prompt, const Layer *layer, int64_t kv_head, int64_t block, Bench *bench) {
    const Model *model = prompt->model;
    const int64_t size = model->head_dim, shared = model->heads / model->kv_heads, total = prompt->rows * shared;
    const int64_t width = (model->heads + 2 * model->kv_heads) * size, value_tiles = num_value_tiles(prompt);
    int32_t seen[SIDE];
    for (int64_t lane = 0; lane < SIDE; lane++) {
        const int64_t query = block * SIDE + lane < total ? block * SIDE + lane : total - 1, row = query / shared;
        const float *values = prompt->qkv + row * width + (kv_head * shared + query % shared) * size;
        uint32_t *out = (uint32_t *)(bench->queries + lane / TILE * size * TILE) + lane % TILE;
        for (int64_t i = 0; i < size; i += GROUP) {
            const __m512 low = _mm512_loadu_ps(values + i), high = _mm512_loadu_ps(values + i + TILE);
            _mm512_i32scatter_epi32(out + i / 2 * TILE, lines_of(TILE), (__m512i)_mm512_cvtne2ps_pbh(high, low), 4);
        }
        seen[lane] = (int32_t)(prompt->start + row + 1);
    }
    Softmax softmax[2];
    for (int i = 0; i < 2; i++)
        softmax[i] = (Softmax){_mm512_loadu_si512(seen + i * TILE), _mm512_set1_ps(-INFINITY), _mm512_setzero_ps()};
    const uint16_t *keys = kv_of(prompt, layer, 0, kv_head), *values = prompt->values + kv_head * value_tiles * GROUP * size;
    const Chain queries = {bench->queries, CELLS, size * TILE, 64};
    for (int64_t at = 0; at < seen[SIDE - 1]; at += KEYS) {
        const int64_t left = (seen[SIDE - 1] - at + GROUP - 1) / GROUP * GROUP, count = left < KEYS ? left : KEYS;
        for (int64_t key = 0; key < count; key += SIDE) {
            /* May read up to 31 rows past the last key: the values follow it. What they give is not looked at. */
            const Chain rows = {keys + (at + key) * size, GROUP, TILE * size, size * (int64_t)sizeof(uint16_t)};
            multiply_block(rows, queries, size / GROUP, 1, 1, 0, bench->scores + key * SIDE);
        }
        for (int i = 0; i < 2; i++) {
            const int hides = at + count > seen[0];
            uint16_t *out = bench->attention + i * count * TILE;
            const __m512 decay = weigh(&softmax[i], bench->scores + i * TILE, at, count, hides, out);
            for (int64_t j = 0; at > 0 && j < size; j++) {
                float *value = bench->values + j * SIDE + i * TILE;
                _mm512_storeu_ps(value, _mm512_mul_ps(_mm512_loadu_ps(value), decay));
            }
        }
        const Chain weights = {bench->attention, CELLS, count * TILE, 64};
        for (int64_t j = 0; j < size; j += SIDE) {
            const Chain rows = {values + at * size + j * GROUP, GROUP * size, TILE * GROUP, 64};
            multiply_block(rows, weights, count / GROUP, 1, 1, at > 0, bench->values + j * SIDE);
        }
    }
    for (int64_t lane = 0; lane < SIDE && block * SIDE + lane < total; lane++) {
        const Softmax *own = &softmax[lane / TILE];
        const int64_t query = block * SIDE + lane;
        const float factor = 1 / ((const float *)&own->sum)[lane % TILE];
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 row = _mm512_i32gather_ps(lines_of(SIDE), bench->values + i * SIDE + lane, 4);
            store_bf16(packed_at(&prompt->attended, query / shared, (kv_head * shared + query % shared) * size + i),
                       _mm512_mul_ps(row, _mm512_set1_ps(factor)));
        }
    }
}

/* `only_last`: of the last layer nothing is wanted but the last row, and everybody's keys and values. */
static void prefill_layer(Prompt *prompt, const Layer *layer, float *room, Bench *bench, int only_last) {
    const Model *model = prompt->model;
    const int64_t rows = prompt->rows, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t from = share(rows, thread, threads), to = share(rows, thread + 1, threads);
    norm_rows(prompt, layer->input_norm, from, to, room, &prompt->normed);
#pragma omp barrier
    multiply_part(&layer->qkv, &prompt->normed, 0, rows, (Target){.kind = STORED, .out = prompt->qkv}, bench);
#pragma omp barrier
    for (int64_t row = from; row < to; row++) place_row(prompt, layer, row);
#pragma omp barrier
    const int64_t value_tiles = num_value_tiles(prompt) * model->kv_heads;
#pragma omp for
    for (int64_t tile = 0; tile < value_tiles; tile++)
        transpose_values(prompt, layer, tile % model->kv_heads, tile / model->kv_heads);
    const int64_t first = only_last ? (rows - 1) / TILE * TILE : 0, shared = model->heads / model->kv_heads;
    const int64_t first_block = first * shared / SIDE, blocks = (rows * shared + SIDE - 1) / SIDE - first_block;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < blocks * model->kv_heads; task++) /* those that see most go first */
        attend_block(prompt, layer, task % model->kv_heads, first_block + blocks - 1 - task / model->kv_heads, bench);
    multiply_part(&layer->out, &prompt->attended, first, rows, (Target){.kind = ADDED, .out = prompt->hidden}, bench);
#pragma omp barrier
    norm_rows(prompt, layer->mlp_norm, first + share(rows - first, thread, threads),
              first + share(rows - first, thread + 1, threads), room, &prompt->normed);
#pragma omp barrier
    multiply_part(&layer->gate_up, &prompt->normed, first, rows, (Target){.kind = GATED, .packed = &prompt->gated}, bench);
#pragma omp barrier
    multiply_part(&layer->down, &prompt->gated, first, rows, (Target){.kind = ADDED, .out = prompt->hidden}, bench);
#pragma omp barrier
}

/* Rows of one slot at [start, start + M): hidden [M, E] goes in as embeddings; its last row comes out after the last layer,
 * and the slot has everybody's keys and values. rotations [M, D] are (cos, sin) of its pairs; query_scales [M] or NULL.
 * should_abort, or NULL, is asked before each layer. The context has at least 32 positions.
 * Returns 0; 1 when it was aborted; -1 when there is no memory: nothing was changed then. */
API int chatglm_prefill(const Model *model, int64_t rows, int64_t slot, int64_t start, const float *rotations,
                        const float *query_scales, float *hidden, int32_t (*should_abort)(void)) {
    Prompt prompt = {.model = model, .rows = rows, .slot = slot, .start = start, .rotations = rotations,
                     .query_scales = query_scales, .hidden = hidden};
    const int64_t attended = model->heads * model->head_dim, width = attended + 2 * model->kv_heads * model->head_dim;
    const size_t sizes[] = {
        sizeof(float) * rows * width, packed_size(rows, model->hidden), packed_size(rows, attended),
        packed_size(rows, model->mlp), sizeof(uint16_t) * num_value_tiles(&prompt) * GROUP * model->kv_heads * model->head_dim,
    };
    size_t shared = 0, starts[5];
    for (int i = 0; i < 5; i++) starts[i] = shared, shared += (sizes[i] + 63) / 64 * 64;
    const size_t own = sizeof(Bench) + (sizeof(float) * model->hidden + 63) / 64 * 64;
    char *memory = aligned_alloc(64, shared + own * omp_get_max_threads());
    if (memory == NULL) return -1;
    prompt.qkv = (float *)memory;
    prompt.normed = (Packed){(uint16_t *)(memory + starts[1]), model->hidden};
    prompt.attended = (Packed){(uint16_t *)(memory + starts[2]), attended};
    prompt.gated = (Packed){(uint16_t *)(memory + starts[3]), model->mlp};
    prompt.values = (uint16_t *)(memory + starts[4]);
#pragma omp parallel
    {
        Bench *bench = (Bench *)(memory + shared + own * omp_get_thread_num());
        TileConfig before;
        take_tiles(&before);
        for (int64_t i = 0; i < model->num_layers && !is_over(should_abort, &prompt.is_aborted); i++)
            prefill_layer(&prompt, model->layers + i, (float *)(bench + 1), bench, i + 1 == model->num_layers);
        leave_tiles(&before);
    }
    free(memory);
    return prompt.is_aborted;
}
