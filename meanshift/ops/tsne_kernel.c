/* The forces between all pairs of points of a t-SNE map.
 *
 * `ops/tsne.py` has the same in torch, which is the reference. A point is compared with all others by
 * one thread, in the lanes of vectors, so the sums do not depend on the threads. */

#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { SUMS = 5 };

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

static float total(Lanes lanes) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* For the points from `first` to `last`: the two components of the attraction and of the repulsion,
 * and the sum of the weights. `x`, `y` and the rows of `affinities` have `padded` values, a multiple
 * of 16; the points of the padding are far away. */
int tsne_forces(const float *x, const float *y, const float *affinities, long padded, long first,
                long last, float *sums) {
    for (long i = first; i < last; i++) {
        Lanes attraction_x = {0}, attraction_y = {0}, repulsion_x = {0}, repulsion_y = {0}, weights = {0};
        for (long j = 0; j < padded; j += LANES) {
            const Lanes dx = x[i] - *(const Lanes *)(x + j);
            const Lanes dy = y[i] - *(const Lanes *)(y + j);
            const Lanes weight = 1 / (1 + dx * dx + dy * dy);
            const Lanes pull = *(const Lanes *)(affinities + i * padded + j) * weight;
            const Lanes push = weight * weight;
            attraction_x += pull * dx;
            attraction_y += pull * dy;
            repulsion_x += push * dx;
            repulsion_y += push * dy;
            weights += weight;
        }
        const Lanes all[SUMS] = {attraction_x, attraction_y, repulsion_x, repulsion_y, weights};
        for (int k = 0; k < SUMS; k++) sums[i * SUMS + k] = total(all[k]);
    }
    return 0;
}
