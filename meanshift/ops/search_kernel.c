/* The k nearest rows of queries by inner product, in one pass and without a matrix of similarities.
 *
 * `ops/topk.py` has the same search in torch, which is the reference. A tile of queries (in the lanes
 * of vectors) and rows is multiplied in registers and compared with the k-th best similarity of each
 * query so far; nearly all tiles have nothing above it. A similarity is a sum in the order of the
 * dimensions, whatever the tile, the thread or the batch. */

#include <float.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4, ROWS = 6 }; /* 24 of 32 registers are sums */
#else
enum { LANES = 8, VECTORS = 2, ROWS = 6 }; /* 12 of 16 */
#endif
enum { GROUP = LANES * VECTORS, BLOCK_BYTES = 1 << 17, PART_BYTES = 1 << 19 };
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

static int is_nan(float value) { /* by its bits: the compiler assumes that there are none */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

static long least(long a, long b) { return a < b ? a : b; }
static long most(long a, long b) { return a > b ? a : b; }

typedef struct {
    const float *rows;
    long dim, k;
    const int64_t *excluded;           /* a row of each query that is no neighbor, or NULL */
    const int64_t *query_ids, *row_ids; /* rows of the id of a query are no neighbors, or NULL */
    float *similarities;               /* of the best k rows of each query, nearest first */
    int64_t *indices;
} Search;

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
static int search_tile(const Search *search, const float *packed, float *thresholds, long first_query,
                       long first_row, long row_count) {
    const float *row[ROWS];
    for (int r = 0; r < ROWS; r++) /* after the last row, that one again */
        row[r] = search->rows + (first_row + (r < row_count ? r : row_count - 1)) * search->dim;
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
                if (is_nan(stored[r][lane])) return NOT_A_NUMBER;
                thresholds[lane] =
                    insert(search, first_query + lane, first_row + r, stored[r][lane]);
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

/* Search all rows for the queries from `first` to `last`; `similarities` has -inf at the start. */
int nearest_rows(const float *queries, long first, long last, const float *rows, long row_count,
                 long dim, const int64_t *excluded, const int64_t *query_ids, const int64_t *row_ids,
                 long k, float *similarities, int64_t *indices) {
    const Search search = {rows, dim, k, excluded, query_ids, row_ids, similarities, indices};
    /* A part of the queries and a block of rows stay in the cache while they are compared. */
    const long part = most(PART_BYTES / (long)sizeof(float) / dim / GROUP, 1) * GROUP;
    const long block = most(BLOCK_BYTES / (long)sizeof(float) / dim / ROWS, 1) * ROWS;
    float *packed = aligned_alloc(64, part * dim * sizeof(float));
    float *thresholds = aligned_alloc(64, part * sizeof(float));
    int status = packed && thresholds ? DONE : NO_MEMORY;
    for (; status == DONE && first < last; first += part) {
        const long count = least(last - first, part), padded = (count + GROUP - 1) / GROUP * GROUP;
        pack(queries + first * dim, count, dim, padded, packed);
        for (long q = 0; q < padded; q++) thresholds[q] = q < count ? similarities[(first + q) * k + k - 1] : FLT_MAX;
        for (long start = 0; status == DONE && start < row_count; start += block) {
            const long stop = least(start + block, row_count);
            for (long q = 0; status == DONE && q < padded; q += GROUP)
                for (long row = start; status == DONE && row < stop; row += ROWS)
                    status = search_tile(&search, packed + q * dim, thresholds + q, first + q, row,
                                         least(stop - row, ROWS));
        }
    }
    free(packed);
    free(thresholds);
    return status;
}
