/* The image operators of a view: `crop_batch` crops, resizes and flips images of any sizes to bytes;
 * `resized_crop_batch` does it for images of one size to unit values; `color_batch` converts bytes to
 * unit values and applies color jitter in the image's own order, grayscale, blur, solarize and
 * normalization.
 *
 * `transforms/augment.py` and `ops/image.py` have the same operators in torch, which are the
 * reference: bytes are equal bit for bit, unit values up to the rounding of float32. An image is
 * computed by one thread in a fixed order, so its result does not depend on the batch or on threads.
 *
 * Loops run over blocks of constant length in aligned buffers: they have no remainder, so a
 * compiler vectorizes all of them, and a value does not depend on its place in memory. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BRIGHTNESS, CONTRAST, SATURATION, HUE };
enum { BYTES_PLANAR, BYTES_INTERLEAVED, FLOATS_PLANAR };
enum { BLOCK = 512, TILE = 64, LANES = 8 };

static const float GRAY_RED = 0.2989f, GRAY_GREEN = 0.587f, GRAY_BLUE = 0.114f;

typedef struct {
    _Alignas(64) float red[BLOCK];
    _Alignas(64) float green[BLOCK];
    _Alignas(64) float blue[BLOCK];
    _Alignas(64) float gray[BLOCK];
} Block;

typedef struct {
    const double *factors;   /* brightness, contrast, saturation, hue shift */
    const int64_t *sequence; /* the order of these four */
    int jittered, grayed, solarized;
    float sigma;
} Color;

typedef struct {
    float mean[3], inverse_std[3];
} Normalization;

typedef int32_t Pixel __attribute__((vector_size(4 * sizeof(int32_t))));
typedef float UnitPixel __attribute__((vector_size(4 * sizeof(float))));
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

static inline float clamp(float value) {
    value = value < 0.0f ? 0.0f : value;
    return value > 1.0f ? 1.0f : value;
}

static void load(const void *image, int layout, long pixels, long start, long count, Block *block) {
    float *red = block->red, *green = block->green, *blue = block->blue;
    const float scale = 1.0f / 255.0f;
    if (layout == FLOATS_PLANAR) {
        const float *plane = (const float *)image + start;
        memcpy(red, plane, count * sizeof(float));
        memcpy(green, plane + pixels, count * sizeof(float));
        memcpy(blue, plane + 2 * pixels, count * sizeof(float));
    } else if (layout == BYTES_PLANAR) {
        const uint8_t *plane = (const uint8_t *)image + start;
        for (long i = 0; i < count; i++) red[i] = plane[i] * scale;
        for (long i = 0; i < count; i++) green[i] = plane[pixels + i] * scale;
        for (long i = 0; i < count; i++) blue[i] = plane[2 * pixels + i] * scale;
    } else {
        const uint8_t *pixel = (const uint8_t *)image + 3 * start;
        for (long i = 0; i < count; i++) {
            red[i] = pixel[3 * i] * scale;
            green[i] = pixel[3 * i + 1] * scale;
            blue[i] = pixel[3 * i + 2] * scale;
        }
    }
    for (long i = count; i < BLOCK; i++) red[i] = green[i] = blue[i] = 0.0f;
}

static void compute_gray(Block *block) {
    for (int i = 0; i < BLOCK; i++)
        block->gray[i] = GRAY_RED * block->red[i] + GRAY_GREEN * block->green[i] +
                         GRAY_BLUE * block->blue[i];
}

/* clamp(factor x + other), where `other` is one value for the whole image. */
static void scale_and_shift(Block *block, float factor, float other) {
    for (int i = 0; i < BLOCK; i++) block->red[i] = clamp(factor * block->red[i] + other);
    for (int i = 0; i < BLOCK; i++) block->green[i] = clamp(factor * block->green[i] + other);
    for (int i = 0; i < BLOCK; i++) block->blue[i] = clamp(factor * block->blue[i] + other);
}

static void saturate(Block *block, float factor, float rest) {
    compute_gray(block);
    for (int i = 0; i < BLOCK; i++) {
        float other = rest * block->gray[i];
        block->red[i] = clamp(factor * block->red[i] + other);
        block->green[i] = clamp(factor * block->green[i] + other);
        block->blue[i] = clamp(factor * block->blue[i] + other);
    }
}

/* How far a channel is below the value, as a fraction of the chroma. */
static inline float below(float hue) {
    float fraction = hue - (float)(int)hue;
    return clamp(2.0f - 6.0f * fabsf(fraction - 1.0f / 3.0f));
}

static void rotate_hue(Block *block, float shift) {
    const float tiny = 1.17549435e-38f;
    for (int i = 0; i < BLOCK; i++) {
        float red = block->red[i], green = block->green[i], blue = block->blue[i];
        float high = red > green ? red : green, low = red < green ? red : green;
        high = high > blue ? high : blue;
        low = low < blue ? low : blue;
        float chroma = high - low;
        float sector = (red - green) + 4.0f * chroma;
        sector = high == green ? (blue - red) + 2.0f * chroma : sector;
        sector = high == red ? green - blue : sector;
        float divisor = 6.0f * chroma;
        divisor = divisor > tiny ? divisor : tiny;
        float hue = sector / divisor + (shift + 1.0f); /* never negative */
        block->red[i] = high - chroma * below(hue + 5.0f / 6.0f);
        block->green[i] = high - chroma * below(hue + 3.0f / 6.0f);
        block->blue[i] = high - chroma * below(hue + 1.0f / 6.0f);
    }
}

static void jitter(Block *block, const Color *color, int operator, float mean) {
    float factor = (float)color->factors[operator];
    float rest = (float)(1.0 - color->factors[operator]);
    if (operator == BRIGHTNESS) scale_and_shift(block, factor, 0.0f);
    else if (operator == CONTRAST) scale_and_shift(block, factor, rest * mean);
    else if (operator == SATURATION) saturate(block, factor, rest);
    else rotate_hue(block, factor);
}

static float sum_gray(Block *block, long count) {
    compute_gray(block);
    for (long i = count; i < BLOCK; i++) block->gray[i] = 0.0f;
    Lanes sums = {0}, values;
    for (int i = 0; i < BLOCK; i += LANES) {
        memcpy(&values, block->gray + i, sizeof values);
        sums += values;
    }
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

static inline void solarize(float *values, int count) {
    for (int i = 0; i < count; i++) values[i] = values[i] < 0.5f ? values[i] : 1.0f - values[i];
}

static void store(const float *values, float *out, long count, const Normalization *normalization,
                  int channel) {
    float mean = normalization->mean[channel], inverse_std = normalization->inverse_std[channel];
    for (long i = 0; i < count; i++) out[i] = (values[i] - mean) * inverse_std;
}

static long blur_radius(float sigma, long height, long width) {
    long most = (height < width ? height : width) - 1;
    float radius = ceilf(3.0f * sigma);
    return radius < most ? (long)radius : most;
}

static inline double bell(long t, double sigma) {
    return exp(-0.5 * (t / sigma) * (t / sigma));
}

static void gaussian(float sigma, long radius, float *weights) {
    double sum = 0.0;
    for (long t = -radius; t <= radius; t++) sum += bell(t, sigma);
    for (long t = -radius; t <= radius; t++) weights[t + radius] = (float)(bell(t, sigma) / sum);
}

static inline long reflect(long i, long size) {
    i = i < 0 ? -i : i;
    return i < size ? i : 2 * (size - 1) - i;
}

/* A weighted sum of `taps` runs of floats; tap `t` begins at runs[t]. */
static inline void weighted_sum(const float *const *runs, const float *weights, long taps, long x,
                                float *out) {
    Lanes sums[TILE / LANES] = {0};
    for (long t = 0; t < taps; t++)
        for (int i = 0; i < TILE / LANES; i++) {
            Lanes values;
            memcpy(&values, runs[t] + x + LANES * i, sizeof values);
            sums[i] += weights[t] * values;
        }
    memcpy(out, sums, sizeof sums);
}

/* Blur a plane along its rows into `smooth`, whose rows have `stride` floats. */
static void blur_rows(const float *plane, long height, long width, const float *weights,
                      long radius, float *row, float *smooth, long stride) {
    const float *runs[2 * radius + 1];
    for (long t = 0; t <= 2 * radius; t++) runs[t] = row + t;
    for (long y = 0; y < height; y++, plane += width, smooth += stride) {
        memcpy(row + radius, plane, width * sizeof(float));
        for (long t = 1; t <= radius; t++) {
            row[radius - t] = plane[t];
            row[radius + width - 1 + t] = plane[width - 1 - t];
        }
        for (long x = 0; x < width; x += TILE)
            weighted_sum(runs, weights, 2 * radius + 1, x, smooth + x);
    }
}

/* Blur three planes, solarize and normalize; of a gray image only the first is there. */
static void blur_image(const float *planes, long height, long width, const Color *color,
                       const Normalization *normalization, float *scratch, float *out) {
    long radius = blur_radius(color->sigma, height, width);
    long stride = (width + TILE - 1) / TILE * TILE, pixels = height * width;
    float weights[2 * radius + 1], sums[TILE];
    const float *runs[2 * radius + 1];
    float *row = scratch, *smooth = scratch + stride + 2 * radius;
    gaussian(color->sigma, radius, weights);
    for (int c = 0; c < (color->grayed ? 1 : 3); c++) {
        blur_rows(planes + c * pixels, height, width, weights, radius, row, smooth, stride);
        for (long y = 0; y < height; y++) {
            for (long t = 0; t <= 2 * radius; t++)
                runs[t] = smooth + reflect(y + t - radius, height) * stride;
            for (long x = 0; x < width; x += TILE) {
                weighted_sum(runs, weights, 2 * radius + 1, x, sums);
                if (color->solarized) solarize(sums, TILE);
                long count = width - x < TILE ? width - x : TILE;
                for (int d = c; d < (color->grayed ? 3 : c + 1); d++)
                    store(sums, out + d * pixels + y * width + x, count, normalization, d);
            }
        }
    }
}

/* The mean gray value before the contrast is adjusted; what precedes it is applied into `work`. */
static float before_contrast(const void *image, int layout, long pixels, const Color *color,
                             int contrast, float *work) {
    Block block;
    double sum = 0.0;
    for (long start = 0; start < pixels; start += BLOCK) {
        long count = pixels - start < BLOCK ? pixels - start : BLOCK;
        load(image, layout, pixels, start, count, &block);
        for (int i = 0; i < contrast; i++) jitter(&block, color, (int)color->sequence[i], 0.0f);
        sum += sum_gray(&block, count);
        if (contrast) {
            memcpy(work + start, block.red, count * sizeof(float));
            memcpy(work + pixels + start, block.green, count * sizeof(float));
            memcpy(work + 2 * pixels + start, block.blue, count * sizeof(float));
        }
    }
    return (float)(sum / pixels);
}

static void color_image(const void *image, int layout, long height, long width, const Color *color,
                        const Normalization *normalization, float *scratch, float *out) {
    static const Normalization none = {{0.0f, 0.0f, 0.0f}, {1.0f, 1.0f, 1.0f}};
    long pixels = height * width;
    int blurred = color->sigma > 0.0f, contrast = 0;
    float *work = blurred ? scratch : out, mean = 0.0f;
    if (color->jittered) {
        while (color->sequence[contrast] != CONTRAST) contrast++;
        mean = before_contrast(image, layout, pixels, color, contrast, work);
        if (contrast) image = work, layout = FLOATS_PLANAR;
    }
    Block block;
    for (long start = 0; start < pixels; start += BLOCK) {
        long count = pixels - start < BLOCK ? pixels - start : BLOCK;
        load(image, layout, pixels, start, count, &block);
        for (int i = contrast; color->jittered && i < 4; i++)
            jitter(&block, color, (int)color->sequence[i], mean);
        if (color->grayed) compute_gray(&block);
        float *planes[3] = {block.red, block.green, block.blue};
        for (int c = 0; c < (color->grayed && blurred ? 1 : 3); c++) {
            float *plane = color->grayed ? block.gray : planes[c];
            if (color->solarized && !blurred && (c == 0 || !color->grayed)) solarize(plane, BLOCK);
            store(plane, work + c * pixels + start, count, blurred ? &none : normalization, c);
        }
    }
    if (blurred)
        blur_image(work, height, width, color, normalization, scratch + 3 * pixels, out);
}

/* Images `first` to `last` of a batch of RGB images; the output is planar and normalized.
 * Returns 0, or 1 where memory is missing. */
int color_batch(const void *images, int layout, long first, long last, long height, long width,
                const double *factors, const int64_t *sequence, const uint8_t *jittered,
                const uint8_t *grayed, const double *sigma, const uint8_t *solarized,
                const float *mean, const float *std, float *out) {
    long stride = (width + TILE - 1) / TILE * TILE, pixels = height * width;
    long floats = 3 * pixels + 3 * stride + height * stride; /* a row has two borders of a radius */
    size_t item = layout == FLOATS_PLANAR ? sizeof(float) : 1;
    float *scratch = calloc(floats, sizeof(float));
    if (!scratch) return 1;
    Normalization normalization;
    for (int c = 0; c < 3; c++) {
        normalization.mean[c] = mean[c];
        normalization.inverse_std[c] = 1.0f / std[c];
    }
    for (long n = first; n < last; n++) {
        Color color = {factors + 4 * n, sequence + 4 * n, jittered[n], grayed[n], solarized[n],
                       (float)sigma[n]};
        color_image((const char *)images + 3 * pixels * n * item, layout, height, width, &color,
                    &normalization, scratch, out + 3 * pixels * n);
    }
    free(scratch);
    return 0;
}

/* How an axis is resized: the first input of each output, and the integer weights of its taps. */
typedef struct {
    int *first, *weights, taps, precision;
} Axis;

/* The exact weights of one output; returns how many there are. */
static int triangle(double scale, long inputs, long output, int *first, double *weights) {
    double support = scale >= 1.0 ? scale : 1.0, inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
    double center = scale * (output + 0.5), sum = 0.0;
    long low = (long)(center - support + 0.5), high = (long)(center + support + 0.5);
    low = low > 0 ? low : 0;
    high = high < inputs ? high : inputs;
    for (long j = 0; j < high - low; j++) {
        double distance = fabs((j + low - center + 0.5) * inverse);
        weights[j] = distance < 1.0 ? 1.0 - distance : 0.0;
        sum += weights[j];
    }
    for (long j = 0; j < high - low; j++) weights[j] /= sum;
    *first = (int)low;
    return (int)(high - low);
}

static int most_taps(long inputs, long outputs) {
    double scale = (double)inputs / outputs;
    return 2 * (int)ceil(scale >= 1.0 ? scale : 1.0) + 1;
}

/* The exact weights of all outputs, `most` for each; returns how many are needed. */
static int triangles(long inputs, long outputs, int most, int *first, double *exact) {
    int taps = 1;
    for (long i = 0; i < outputs; i++) {
        int count = triangle((double)inputs / outputs, inputs, i, first + i, exact + i * most);
        taps = count > taps ? count : taps;
    }
    return taps;
}

static int make_axis(Axis *axis, long inputs, long outputs) {
    double highest = 0.0;
    int most = most_taps(inputs, outputs);
    double *exact = calloc((size_t)outputs * most, sizeof(double));
    axis->first = malloc((size_t)outputs * (1 + most) * sizeof(int));
    if (!exact || !axis->first) {
        free(exact);
        return 1;
    }
    axis->weights = axis->first + outputs;
    axis->taps = triangles(inputs, outputs, most, axis->first, exact);
    for (long i = 0; i < outputs * most; i++) highest = exact[i] > highest ? exact[i] : highest;
    /* As many bits as the highest weight leaves of 15. */
    for (axis->precision = 0; axis->precision < 22; axis->precision++)
        if ((int)(0.5 + highest * (1 << (axis->precision + 1))) >= 1 << 15) break;
    for (long i = 0; i < outputs; i++)
        for (int j = 0; j < axis->taps; j++)
            axis->weights[i * axis->taps + j] =
                (int)(0.5 + exact[i * most + j] * (1 << axis->precision));
    free(exact);
    return 0;
}

/* Resize a row of RGB values, which goes on with zeros for all taps; `sums` has an element more. */
static inline void resize_row(const int32_t *restrict row, const Axis *axis, int taps, long outputs,
                              int flip, int32_t *restrict sums) {
    long step = flip ? -1 : 1;
    const int *first = axis->first + (flip ? outputs - 1 : 0);
    const int *weights = axis->weights + (flip ? outputs - 1 : 0) * taps;
    for (long x = 0; x < outputs; x++, first += step, weights += step * taps) {
        Pixel sum = {0}, values;
        for (int j = 0; j < taps; j++) {
            memcpy(&values, row + 3 * (*first + j), sizeof values);
            sum += weights[j] * values;
        }
        memcpy(sums + 3 * x, &sum, sizeof sum); /* the next pixel overwrites the fourth element */
    }
}

static void resize_rows(const uint8_t *image, long row_bytes, long height, long width,
                        const Axis *axis, long outputs, int flip, int32_t *buffer, uint8_t *out) {
    int32_t *row = buffer, *sums = buffer + 3 * (width + axis->taps) + 1;
    int precision = axis->precision, half = 1 << (precision - 1);
    for (long y = 0; y < height; y++, image += row_bytes, out += 3 * outputs) {
        for (long x = 0; x < 3 * width; x++) row[x] = image[x];
        if (axis->taps == 2) resize_row(row, axis, 2, outputs, flip, sums); /* enlarged */
        else if (axis->taps == 3) resize_row(row, axis, 3, outputs, flip, sums);
        else resize_row(row, axis, axis->taps, outputs, flip, sums);
        /* No sum leaves the range of a byte, because no weight is negative. */
        for (long x = 0; x < 3 * outputs; x++) out[x] = (uint8_t)((sums[x] + half) >> precision);
    }
}

static void resize_column(const uint8_t *restrict rows, long stride, const Axis *axis, long i,
                          int32_t *restrict sums, uint8_t *restrict out) {
    int taps = axis->taps, precision = axis->precision, half = 1 << (precision - 1);
    const int *weights = axis->weights + i * taps;
    rows += axis->first[i] * stride;
    if (taps == 2) {
        const uint8_t *next = rows + stride;
        int weight = weights[0], next_weight = weights[1];
        for (long x = 0; x < stride; x++)
            out[x] = (uint8_t)((half + weight * rows[x] + next_weight * next[x]) >> precision);
        return;
    }
    for (long x = 0; x < stride; x++) sums[x] = half;
    for (int j = 0; j < taps; j++) {
        int weight = weights[j];
        for (long x = 0; x < stride; x++) sums[x] += weight * rows[j * stride + x];
    }
    for (long x = 0; x < stride; x++) out[x] = (uint8_t)(sums[x] >> precision);
}

static int crop_image(const uint8_t *image, long row_bytes, const int64_t *box, int flip, long side,
                      uint8_t *out) {
    long height = box[2], width = box[3], stride = 3 * side;
    Axis rows = {0}, columns = {0};
    int failed = make_axis(&rows, width, side) || make_axis(&columns, height, side);
    size_t buffer_size = failed ? 1 : 3 * (width + rows.taps) + 1 + stride + 1;
    size_t resized_size = failed ? 1 : (height + columns.taps) * stride;
    int32_t *buffer = calloc(buffer_size, sizeof(int32_t));
    uint8_t *resized = calloc(resized_size, 1); /* taps without weight may be below the last row */
    failed = failed || !buffer || !resized;
    if (!failed) {
        resize_rows(image + box[0] * row_bytes + 3 * box[1], row_bytes, height, width, &rows, side,
                    flip, buffer, resized);
        for (long y = 0; y < side; y++)
            resize_column(resized, stride, &columns, y, buffer, out + y * stride);
    }
    free(rows.first);
    free(columns.first);
    free(buffer);
    free(resized);
    return failed;
}

/* Crops `first` to `last` of a batch of RGB images of any sizes, as interleaved bytes; a box is
 * (top, left, height, width). Returns 0, or 1 where memory is missing. */
int crop_batch(const uint8_t *const *images, const int64_t *row_bytes, const int64_t *boxes,
               const uint8_t *flips, long first, long last, long side, uint8_t *out) {
    for (long n = first; n < last; n++)
        if (crop_image(images[n], row_bytes[n], boxes + 4 * n, flips[n], side,
                       out + 3 * side * side * n))
            return 1;
    return 0;
}

/* How an axis is resized to unit values; the arrays are long enough for any box of the images. */
typedef struct {
    int *first, taps;
    double *exact;
    float *weights;
} UnitAxis;

static void fill_axis(UnitAxis *axis, long inputs, long outputs) {
    int most = most_taps(inputs, outputs);
    memset(axis->exact, 0, (size_t)outputs * most * sizeof(double));
    axis->taps = triangles(inputs, outputs, most, axis->first, axis->exact);
    for (long i = 0; i < outputs; i++)
        for (int j = 0; j < axis->taps; j++)
            axis->weights[i * axis->taps + j] = (float)axis->exact[i * most + j];
}

/* Resize a row of RGB unit values, which goes on with zeros for all taps. */
static inline void resize_unit_row(const float *restrict row, const UnitAxis *axis, int taps,
                                   long outputs, int flip, float *restrict out) {
    long step = flip ? -1 : 1;
    const int *first = axis->first + (flip ? outputs - 1 : 0);
    const float *weights = axis->weights + (flip ? outputs - 1 : 0) * taps;
    for (long x = 0; x < outputs; x++, first += step, weights += step * taps) {
        UnitPixel sum = {0}, values;
        for (int j = 0; j < taps; j++) {
            memcpy(&values, row + 3 * (*first + j), sizeof values);
            sum += weights[j] * values;
        }
        memcpy(out + 3 * x, &sum, sizeof sum); /* the next pixel overwrites the fourth element */
    }
}

/* A weighted sum of `taps` rows, which follow one another, into three planes. */
static inline void resize_unit_column(const float *restrict rows, const float *weights, int taps,
                                      long side, float *restrict sums, float *restrict out) {
    long stride = 3 * side;
    for (long x = 0; x < stride; x++) sums[x] = weights[0] * rows[x];
    for (int j = 1; j < taps; j++)
        for (long x = 0; x < stride; x++) sums[x] += weights[j] * rows[j * stride + x];
    for (int c = 0; c < 3; c++)
        for (long x = 0; x < side; x++) out[c * side * side + x] = sums[3 * x + c];
}

static void resized_crop_image(const uint8_t *image, long row_bytes, const int64_t *box, int flip,
                               long side, UnitAxis *axis, float *row, float *resized, float *sums,
                               float *out) {
    const float scale = 1.0f / 255.0f;
    long height = box[2], width = box[3], stride = 3 * side;
    image += box[0] * row_bytes + 3 * box[1];
    fill_axis(axis, width, side);
    int taps = axis->taps;
    for (long x = 3 * width; x < 3 * (width + taps) + 1; x++) row[x] = 0.0f;
    for (long y = 0; y < height; y++) {
        for (long x = 0; x < 3 * width; x++) row[x] = image[y * row_bytes + x] * scale;
        float *to = resized + y * stride;
        if (taps == 2) resize_unit_row(row, axis, 2, side, flip, to); /* enlarged */
        else if (taps == 3) resize_unit_row(row, axis, 3, side, flip, to);
        else resize_unit_row(row, axis, taps, side, flip, to);
    }
    fill_axis(axis, height, side);
    taps = axis->taps;
    memset(resized + height * stride, 0, taps * stride * sizeof(float)); /* taps without weight */
    for (long y = 0; y < side; y++) {
        const float *rows = resized + axis->first[y] * stride, *weights = axis->weights + y * taps;
        if (taps == 2) resize_unit_column(rows, weights, 2, side, sums, out + y * side);
        else if (taps == 3) resize_unit_column(rows, weights, 3, side, sums, out + y * side);
        else resize_unit_column(rows, weights, taps, side, sums, out + y * side);
    }
}

/* Crops `first` to `last` of a batch of interleaved RGB images of one size, as planar unit values; a
 * box is (top, left, height, width). Returns 0, or 1 where memory is missing. */
int resized_crop_batch(const uint8_t *images, long height, long width, const int64_t *boxes,
                       const uint8_t *flips, long first, long last, long side, float *out) {
    long longest = height > width ? height : width, most = most_taps(longest, side);
    long row = 3 * (width + most) + 1, resized = 3 * side * (height + most) + 1, sums = 3 * side;
    float *buffer = calloc(row + resized + sums + side * most, sizeof(float));
    UnitAxis axis = {malloc(side * sizeof(int)), 0, malloc(side * most * sizeof(double)),
                     buffer + row + resized + sums};
    int failed = !buffer || !axis.first || !axis.exact;
    for (long n = first; n < last && !failed; n++)
        resized_crop_image(images + 3 * height * width * n, 3 * width, boxes + 4 * n, flips[n],
                           side, &axis, buffer, buffer + row, buffer + row + resized,
                           out + 3 * side * side * n);
    free(buffer);
    free(axis.first);
    free(axis.exact);
    return failed;
}
