/* The decode step on a CPU: matrices of 4 and 8 bits times a few rows, and all layers of the causal decoder around them.
 *
 * One call computes M tokens, of different answers or of one prompt, in one parallel region: between two kernels the
 * threads meet at a barrier instead of going through Python and torch 25 times a layer. Compiled once per instruction set
 * (setup.py) and called through ctypes (native.py), so it needs neither Python's nor torch's headers. It is compiled
 * for OpenMP but not linked with it: the symbols are those of the libgomp that torch has loaded, hence one set of
 * threads, and torch.set_num_threads counts here too.
 *
 * A product takes the 16 values of NF4 as multiples of 1 / 112.03, the unit between 60 and 127 with the least error:
 * 0.0017, where the weights of a block are around 0.4. `chatglm_unpack_nf4` gives them exactly.
 *
 * Activations are rounded twice to 8 bits, with a scale for each group of 32: to the nearest unit, and what that leaves to
 * the nearest 254th of one. So they have 15 bits, where llama.cpp's Q8_1 has 8 and bfloat16 as many. Each row's result
 * depends on that row alone: it is the same, bit for bit, in any batch and with any number of threads.
 *
 * Letters: M rows, E hidden size, F mlp size, H query heads, G kv heads, D head dim, C context.
 */
#include "lanes.h"

enum { ROWS_AT_ONCE = 6, SPAN = 256, MANY_ROWS = 6, QUERIES_AT_ONCE = 4 };
#define FINE 254.0f /* what is left of half a unit fits into 8 bits */

/* Rounded activations of M rows, x = (q + fine / FINE) * scale: q and fine [M, K], and for each group its scale, the sums
 * of q and of fine, and the sum of x. */
typedef struct {
    int8_t *q, *fine;
    float *scale, *sum;
    int32_t *count, *fine_count;
} Rounded;

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

/* --- matrix times rows ---------------------------------------------------------------------------------------------- */

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

/* One token for each of M rows: hidden [M, E] goes in as embeddings and comes out after the last layer. Row m is in slot
 * slots[m] at positions[m], and sees all positions of its slot up to its own, also those that this step writes: several
 * tokens of one prompt may be in it. rotations [M, D] are (cos, sin) of its pairs; query_scales [M] or NULL.
 * should_abort, or NULL, is asked before each layer.
 * Returns 0; 1 when it was aborted; -1 when there is no memory: nothing was changed then. */
API int chatglm_step(const Model *model, int64_t rows, const int64_t *slots, const int64_t *positions,
                     const float *rotations, const float *query_scales, float *hidden, int32_t (*should_abort)(void)) {
    int64_t last = 0;
    for (int64_t row = 0; row < rows; row++) last = larger(last, positions[row]);
    Step step = {model, rows, num_spans(last), slots, positions, rotations, query_scales, hidden, NULL, NULL, NULL, 0};
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
        for (int64_t i = 0; i < model->num_layers && !is_over(should_abort, &step.is_aborted); i++) run_layer(&step, model->layers + i, &before);
    }
    free(memory);
    return step.is_aborted;
}
