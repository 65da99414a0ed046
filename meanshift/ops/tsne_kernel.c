/* The gradient descent of a t-SNE map, with the forces between all pairs of points.
 *
 * `ops/tsne.py` has the same in torch, which is the reference. A point is compared with all others in
 * the lanes of vectors. One call does all iterations, so a thread of Python that does so does not
 * wait for the interpreter's lock in between. */

#include <stdlib.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

typedef struct {
    float attraction[2], repulsion[2], weights;
} Forces;

static float total(Lanes lanes) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* The forces on point `i`, and the sum of the weights of its pairs. */
static Forces forces_on(long i, const float *x, const float *y, const float *affinities, long padded) {
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
    return (Forces){{total(attraction_x), total(attraction_y)},
                    {total(repulsion_x), total(repulsion_y)},
                    total(weights)};
}

typedef struct {
    Forces forces;
    float update[2], gain[2];
} State;

/* Move the points. `x`, `y` and the rows of `affinities` have `padded` values, a multiple of 16; the
 * points of the padding are far away. Returns 1 if there is no memory, else 0. */
int tsne_descend(const float *affinities, long size, long padded, float exaggeration, float rate,
                 float min_gain, long exploration, long iterations, float *x, float *y) {
    State *states = calloc(size, sizeof *states);
    if (!states) return 1;
    float *points[2] = {x, y};
    for (long i = 0; i < size; i++) states[i].gain[0] = states[i].gain[1] = 1;
    for (long iteration = 0; iteration < iterations; iteration++) {
        const int exploring = iteration < exploration;
        double normalizer = -size; /* without the pairs of a point and itself */
        for (long i = 0; i < size; i++) {
            states[i].forces = forces_on(i, x, y, affinities, padded);
            normalizer += states[i].forces.weights;
        }
        for (long i = 0; i < size; i++)
            for (int axis = 0; axis < 2; axis++) {
                State *state = states + i;
                const float pull = state->forces.attraction[axis] * (exploring ? exaggeration : 1);
                const float push = state->forces.repulsion[axis] / (float)normalizer;
                const float gradient = 4 * (pull - push);
                float *gain = state->gain + axis, *update = state->update + axis;
                *gain = *update * gradient < 0 ? *gain + 0.2f : *gain * 0.8f;
                if (*gain < min_gain) *gain = min_gain;
                *update = *update * (exploring ? 0.5f : 0.8f) - rate * *gain * gradient;
                points[axis][i] += *update;
            }
    }
    free(states);
    return 0;
}
