/* The k nearest rows of queries by inner product, in one pass and without a matrix of similarities.
 *
 * `ops/topk.py` has the same search in torch, which is the reference. A tile of queries (in the lanes
 * of vectors) and rows is multiplied in registers and compared with the k-th best similarity of each
 * query so far; nearly all tiles have nothing above it. A similarity is a sum in the order of the
 * dimensions, whatever the tile, the thread or the batch.
 *
 * A processor with products of bfloat16 first computes similarities of rounded values, which takes
 * half of the time, and then those of the rows that are near but for the error of rounding. */

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4, ROWS = 6 }; /* 24 of 32 registers are sums */
#else
enum { LANES = 8, VECTORS = 2, ROWS = 6 }; /* 12 of 16 */
#endif
enum { GROUP = LANES * VECTORS, BLOCK_BYTES = 1 << 17, PART_BYTES = 1 << 19 };
enum { PAUSE = 8 }; /* blocks compared in full after one of which rounding spared less than half */
enum { DONE, NO_MEMORY, NOT_A_NUMBER };

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

/* A bit for each lane of `a` that is above that of `b`, or not a number. */
static inline unsigned above(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLE_UQ);
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_NLE_UQ));
#endif
}

static long least(long a, long b) { return a < b ? a : b; }
static long most(long a, long b) { return a > b ? a : b; }

typedef struct {
    const float *rows;
    long row_count, dim, k, block;
    const int64_t *excluded;           /* a row of each query that is no neighbor, or NULL */
    const int64_t *query_ids, *row_ids; /* rows of the id of a query are no neighbors, or NULL */
    float *similarities;               /* of the best k rows of each query, nearest first */
    int64_t *indices;
} Search;

/* Queries that are searched together. */
typedef struct {
    long first, lanes;          /* whole groups of lanes, of which the last ones may have no query */
    float *packed, *thresholds; /* the k-th best similarities so far */
} Part;

/* Add a row to the best of a query, whose last one it replaces; returns the new k-th similarity. */
static float insert(const Search *search, long query, long row, float similarity) {
    float *best = search->similarities + query * search->k;
    int64_t *indices = search->indices + query * search->k;
    const int is_excluded = (search->excluded && search->excluded[query] == row) ||
                            (search->row_ids && search->row_ids[row] == search->query_ids[query]);
    long place = search->k - 1;
    if (!is_excluded) {
        for (; place > 0 && best[place - 1] < similarity; place--) {
            best[place] = best[place - 1];
            indices[place] = indices[place - 1];
        }
        best[place] = similarity;
        indices[place] = row;
    }
    return best[search->k - 1];
}

/* Compare a group of queries with up to ROWS rows. */
static int search_tile(const Search *search, const float *packed, float *thresholds,
                       long first_query, const long *numbers, long row_count) {
    const float *row[ROWS];
    for (int r = 0; r < ROWS; r++) /* after the last row, that one again */
        row[r] = search->rows + numbers[r < row_count ? r : row_count - 1] * search->dim;
    Lanes sums[ROWS][VECTORS] = {0};
    for (long d = 0; d < search->dim; d++) {
        const Lanes *values = (const Lanes *)(packed + d * GROUP);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] += row[r][d] * values[v];
    }
    unsigned found = 0;
    for (int v = 0; v < VECTORS; v++) {
        const Lanes threshold = ((const Lanes *)thresholds)[v];
        for (int r = 0; r < ROWS; r++) found |= above(sums[r][v], threshold);
    }
    if (!found) return DONE;
    _Alignas(64) float stored[ROWS][GROUP];
    for (int r = 0; r < ROWS; r++) /* not memcpy, which would keep the sums in memory */
        for (int v = 0; v < VECTORS; v++) ((Lanes *)stored[r])[v] = sums[r][v];
    for (long r = 0; r < row_count; r++)
        for (int v = 0; v < VECTORS; v++) {
            unsigned lanes = above(((Lanes *)stored[r])[v], ((Lanes *)thresholds)[v]);
            for (; lanes; lanes &= lanes - 1) {
                const int lane = v * LANES + __builtin_ctz(lanes);
                if (isnan(stored[r][lane])) return NOT_A_NUMBER;
                thresholds[lane] =
                    insert(search, first_query + lane, numbers[r], stored[r][lane]);
            }
        }
    return DONE;
}

/* Put `count` queries into the lanes of groups; lanes without a query find nothing. */
static void pack(const float *queries, long count, long dim, long padded, float *packed) {
    for (long query = 0; query < padded; query++) {
        float *lane = packed + query / GROUP * GROUP * dim + query % GROUP;
        for (long d = 0; d < dim; d++) lane[d * GROUP] = query < count ? queries[query * dim + d] : 0;
    }
}

/* A block of rows and a part of the queries, rounded to bfloat16; two values are a pair. */
typedef struct {
    long pairs, stride; /* of a row; the stride is a multiple of what is rounded at once */
    uint32_t *rows, *packed, *query;
    float *row_norms, *margins;
} Rounded;

#if defined(__AVX512BF16__)
enum { CAN_ROUND = 1 };

/* Round values; returns at least their norm, or NaN where squares might leave the range of float32:
 * then no similarity is below a threshold, and all of them are computed. */
static float round_values(const float *values, long dim, uint32_t *pairs) {
    __m512 squares = _mm512_setzero_ps();
    for (long d = 0; d < dim; d += 2 * LANES) {
        const uint32_t mask = dim - d < 2 * LANES ? (1u << (dim - d)) - 1 : ~0u;
        const __m512 low = _mm512_maskz_loadu_ps((__mmask16)mask, values + d);
        const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(mask >> LANES), values + d + LANES);
        const __m512bh rounded = _mm512_cvtne2ps_pbh(high, low);
        squares = _mm512_dpbf16_ps(squares, rounded, rounded);
        _mm512_storeu_si512(pairs + d / 2, (__m512i)rounded);
    }
    const float sum = _mm512_reduce_add_ps(squares);
    return sum > 1e-24f && sum < 1e30f ? 1.005f * sqrtf(sum) : __builtin_nanf("");
}

/* A bit for each of ROWS rows of the block that may be above the threshold of a query. */
static unsigned candidates(const Rounded *rounded, long first_row, long first_lane,
                           const float *thresholds) {
    const uint32_t *rows = rounded->rows + first_row * rounded->stride;
    const uint32_t *packed = rounded->packed + first_lane * rounded->pairs;
    __m512 sums[ROWS][VECTORS] = {0};
    for (long p = 0; p < rounded->pairs; p++) {
        const __m512bh *values = (const __m512bh *)(packed + p * GROUP);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)rows[r * rounded->stride + p]);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], values[v], pair);
        }
    }
    unsigned found = 0;
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        unsigned lanes = 0;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const __m512 margin = ((const __m512 *)(rounded->margins + first_lane))[v];
            const __m512 most = sums[r][v] + margin * rounded->row_norms[first_row + r];
            lanes |= above((Lanes)most, ((const Lanes *)thresholds)[v]);
        }
        found |= (unsigned)(lanes != 0) << r;
    }
    return found;
}
#else
enum { CAN_ROUND = 0 };
static float round_values(const float *values, long dim, uint32_t *pairs) {
    return (void)values, (void)dim, (void)pairs, 0;
}
static unsigned candidates(const Rounded *rounded, long first_row, long first_lane,
                           const float *thresholds) {
    return (void)rounded, (void)first_row, (void)first_lane, (void)thresholds, ~0u;
}
#endif

/* Put `count` rounded queries into the lanes of groups; lanes without a query have zeros.
 *
 * A rounded value has 8 bits, so rounding moves it by at most 1/256 of itself, the product of two by
 * at most 1/128 + 1/256^2, and a similarity by that times both norms. A sum of float32 loses at most
 * dim / 2^24 of them, and two sums are compared. */
static void pack_rounded(const float *queries, long count, long dim, long padded,
                         const Rounded *rounded) {
    const float of_norms = 1.01f / 128 + (float)dim / (1 << 22);
    for (long query = 0; query < padded; query++) {
        uint32_t *lane = rounded->packed + query / GROUP * GROUP * rounded->pairs + query % GROUP;
        rounded->margins[query] = 0;
        if (query < count)
            rounded->margins[query] =
                of_norms * round_values(queries + query * dim, dim, rounded->query);
        for (long p = 0; p < rounded->pairs; p++)
            lane[p * GROUP] = query < count ? rounded->query[p] : 0;
    }
}

/* Compare a group of queries with the rows of a block: all, or if `is_rounded` those that may be
 * near. Counts the rows. */
static int search_block(const Search *search, const Rounded *rounded, int is_rounded,
                        const Part *part, long lane, long start, long *compared) {
    const long dim = search->dim, stop = least(start + search->block, search->row_count);
    const float *packed = part->packed + lane * dim;
    float *thresholds = part->thresholds + lane;
    long chosen[ROWS], count = 0;
    int status = DONE;
    for (long row = start; status == DONE && row < stop; row += ROWS) {
        unsigned found = (1u << least(stop - row, ROWS)) - 1;
        if (is_rounded) {
            /* Ask for this group's share of the rows that come a block later. */
            const long later = row + search->block, last = (lane + GROUP) * dim / part->lanes;
            for (long r = later; r < least(later + ROWS, search->row_count); r++)
                for (long d = lane * dim / part->lanes; d < last; d += LANES)
                    __builtin_prefetch(search->rows + r * dim + d);
            found &= candidates(rounded, row - start, lane, thresholds);
        }
        for (; status == DONE && found; found &= found - 1) {
            chosen[count++] = row + __builtin_ctz(found);
            if (count < ROWS) continue;
            status = search_tile(search, packed, thresholds, part->first + lane, chosen, ROWS);
            *compared += ROWS;
            count = 0;
        }
    }
    *compared += count;
    if (status != DONE || !count) return status;
    return search_tile(search, packed, thresholds, part->first + lane, chosen, count);
}

/* Search all rows for the queries from `first` to `last`; `similarities` has -inf at the start.
 * `rounds` allows to compare rounded values first, which changes no result. */
int nearest_rows(const float *queries, long first, long last, const float *rows, long row_count,
                 long dim, const int64_t *excluded, const int64_t *query_ids, const int64_t *row_ids,
                 long k, long rounds, float *similarities, int64_t *indices) {
    /* A part of the queries and a block of rows stay in the cache while they are compared. */
    const long part_size = most(PART_BYTES / (long)sizeof(float) / dim / GROUP, 1) * GROUP;
    const long block = most(BLOCK_BYTES / (long)sizeof(float) / dim / ROWS, 1) * ROWS;
    const Search search = {rows,     row_count, dim,     k,            block,
                           excluded, query_ids, row_ids, similarities, indices};
    Rounded rounded = {.pairs = (dim + 1) / 2,
                       .stride = (dim + 2 * LANES - 1) / (2 * LANES) * LANES};
    const long values = part_size * (dim + 2 + rounded.pairs) + (block + 1) * (rounded.stride + 1);
    float *memory = aligned_alloc(64, (values + LANES - 1) / LANES * LANES * sizeof(float));
    if (!memory) return NO_MEMORY;
    Part part = {.packed = memory, .thresholds = memory + part_size * dim};
    rounded.margins = part.thresholds + part_size;
    rounded.packed = (uint32_t *)(rounded.margins + part_size);
    rounded.rows = rounded.packed + part_size * rounded.pairs;
    rounded.query = rounded.rows + block * rounded.stride;
    rounded.row_norms = (float *)(rounded.query + rounded.stride);
    rounds = rounds && CAN_ROUND;
    int status = DONE;
    for (part.first = first; status == DONE && part.first < last; part.first += part_size) {
        const long count = least(last - part.first, part_size);
        part.lanes = (count + GROUP - 1) / GROUP * GROUP;
        pack(queries + part.first * dim, count, dim, part.lanes, part.packed);
        if (rounds) pack_rounded(queries + part.first * dim, count, dim, part.lanes, &rounded);
        for (long lane = 0; lane < part.lanes; lane++)
            part.thresholds[lane] =
                lane < count ? similarities[(part.first + lane) * k + k - 1] : FLT_MAX;
        long pause = 0; /* blocks until rounded values are tried again */
        for (long start = 0; status == DONE && start < row_count; start += block) {
            const long size = least(block, row_count - start);
            const int is_rounded = rounds && --pause < 0;
            for (long row = 0; is_rounded && row < size; row++)
                rounded.row_norms[row] = round_values(rows + (start + row) * dim, dim,
                                                      rounded.rows + row * rounded.stride);
            long compared = 0;
            for (long lane = 0; status == DONE && lane < part.lanes; lane += GROUP)
                status = search_block(&search, &rounded, is_rounded, &part, lane, start, &compared);
            if (is_rounded) pause = 2 * GROUP * compared > size * part.lanes ? PAUSE : 0;
        }
    }
    free(memory);
    return status;
}
