/* The whole forward pass of one step, for the instruction set and the weights' dtype that it is compiled for.

   A step computes rows: some positions of one sequence, or of many. Exact by construction: every output is one sequential
   sum, every row is computed from its own numbers and the keys and values up to its position, and attention goes over
   absolute tiles merged in order. How rows are shared out among threads, calls and batches is nowhere in a result.

   Compiled with -DVARIANT=... -DDTYPE=f32|bf16|f16 -DDTYPE_IS_...; -DDOT_PAIRS_HERE where bf16 has a dot product, whose
   rows are then rounded to bf16. Otherwise rows stay in float32. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "numbers.h"
#include "step.h"
#include "team.h"

#ifdef __SANITIZE_ADDRESS__ /* `make sanitize`: who writes beyond a buffer of the scratch is caught there */
#include <sanitizer/asan_interface.h>
enum { GUARD = 64 };
#else
enum { GUARD = 0 };
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#endif

#if defined DTYPE_IS_bf16
typedef uint16_t weight;
enum { PAIRED = 1 };
static inline float from_weight(weight w) { return from_bf16(w); }
static inline weight to_weight(float x) { return to_bf16(x); }
static inline int weight_is_finite(weight w) { return (w & 0x7f80u) != 0x7f80u; }
#elif defined DTYPE_IS_f16
typedef uint16_t weight;
enum { PAIRED = 0 };
static inline float from_weight(weight w) { return _cvtsh_ss(w); }
static inline weight to_weight(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline int weight_is_finite(weight w) { return (w & 0x7c00u) != 0x7c00u; }
#else
typedef float weight;
enum { PAIRED = 0 };
static inline float from_weight(weight w) { return w; }
static inline weight to_weight(float x) { return x; }
static inline int weight_is_finite(weight w) { return is_finite(w); }
#endif

#ifdef DOT_PAIRS_HERE
typedef uint16_t number; /* of a row that a product reads */
static inline number to_number(float x) { return to_bf16(x); }
static inline float from_number(number x) { return from_bf16(x); }
#else
typedef float number;
static inline number to_number(float x) { return x; }
static inline float from_number(number x) { return x; }
#endif

#define PRODUCT plain
#define ROW float
#define WEIGHT float
#define KIND FROM_F32
#include "product.h"

#define PRODUCT packed
#define ROW number
#define WEIGHT weight
#if defined DOT_PAIRS_HERE
#define KIND DOT_BF16
#elif defined DTYPE_IS_bf16
#define KIND FROM_BF16
#elif defined DTYPE_IS_f16
#define KIND FROM_F16
#else
#define KIND FROM_F32
#endif
#include "product.h"

enum {
    ROW_BLOCK = 2 * ROWS_AT_ONCE, /* query rows of an attention task */
    CHUNK_ROWS = 16 * ROWS_AT_ONCE, /* rows of a product's task: they stay in the second-level cache */
    TASK_BYTES = 1 << 16,           /* of weights, of a product's task */
    TILE_BLOCKS = TILE / LANES,
};

static inline int padded(int width) { return (width + LANES - 1) / LANES * LANES; }
static inline int least(int a, int b) { return a < b ? a : b; }

/* What attention does in one go. A span is the rows of neighbouring sequences over a tile that they share, or a few rows
   of one over a tile of its own; their parts lie from `slot` on. A strip is up to ROW_BLOCK query rows of a sequence, over
   all of its tiles. Rows and query rows are counted from the first of the plan. */
typedef struct {
    int sequence, tile, row, rows, slot;
} span;
typedef struct {
    int sequence, query, queries;
} strip;

/* The rows that a layer goes on with: all of the call, or in the last layer those that get scores. */
typedef struct {
    int rows, num_spans, num_strips, num_spanned;
    int *sequence, *position; /* of each row */
    int *start, *count;       /* of each sequence: its first row, and how many */
    int *spanned;             /* the rows whose parts spans compute */
    int *slots, *first_slot;  /* of sequence s over tile t: slots[first_slot[s] + t] */
    span *spans;
    strip *strips;
} plan;

typedef struct {
    const kv_model *m; /* the first sequence's: all but the corrections are everyone's */
    const kv_call *c;
    plan all, scored;
    int group, rank, part;      /* query heads of a key-value head; the widest correction's; numbers of a part */
    int hidden, head, heads_width, inner, wide; /* padded; `wide` is of the qkv and up products */
    float *x, *t;               /* the residual stream [rows, hidden]; a product's outputs [rows, wide] */
    number *h, *attended, *gated; /* what products read: [rows, hidden], [rows, heads_width], [rows, inner] */
    number *queries;            /* [kv_heads, rows * group, head] */
    float *parts;               /* [kv_heads, slots, part]: output, largest score, mass */
    int slots;
    float *low, *correction, *plain_rows; /* of adapters: [rows, rank], [rows, wide], [rows, widest input] */
    int cancelled;
} work;

#include "plan.h"

/* Products. */

/* A layer's product as a sequence has it, with its own corrections. */
static const kv_linear *own(const work *w, const kv_linear *l, int sequence) {
    const kv_layer *layers = w->c->sequences[sequence].model->layers;
    return (const kv_linear *)((const char *)layers + ((const char *)l - (const char *)w->m->layers));
}

/* y [rows, stride] += the low-rank corrections of rows x, each by its own sequence's. */
static void correct(team *t, const work *w, const plan *p, const kv_linear *l, const number *x, ptrdiff_t x_stride,
                    float *y, ptrdiff_t y_stride) {
    for (int row, many; (row = ROWS_AT_ONCE * team_take(t)) < p->rows;)
        for (int end = least(row + ROWS_AT_ONCE, p->rows); row < end; row += many) {
            const kv_linear *mine = own(w, l, p->sequence[row]);
            for (many = 1; row + many < end && own(w, l, p->sequence[row + many]) == mine;) many++;
            if (mine->num_corrections == 0) continue;
            float *plain = w->plain_rows + (size_t)row * l->inputs;
            for (int r = 0; r < many; r++)
                for (int i = 0; i < l->inputs; i++)
                    plain[r * (size_t)l->inputs + i] = from_number(x[(row + r) * x_stride + i]);
            for (int j = 0; j < mine->num_corrections; j++) {
                const kv_lora *a = &mine->corrections[j];
                int rank = padded(a->rank), outputs = padded(a->outputs);
                float *low = w->low + (size_t)row * w->rank, *found = w->correction + (size_t)row * w->wide;
                plain_rows(plain, l->inputs, many, a->a, (ptrdiff_t)l->inputs * LANES, rank / LANES, LANES, l->inputs,
                           NULL, 0, low, rank, 0);
                plain_rows(low, rank, many, a->b, (ptrdiff_t)a->rank * LANES, outputs / LANES, LANES, a->rank, NULL, 0,
                           found, w->wide, 0);
                for (int r = 0; r < many; r++)
                    for (int i = 0; i < a->outputs; i++)
                        y[(row + r) * y_stride + a->start + i] += a->scale * found[r * w->wide + i];
            }
        }
    team_barrier(t);
}

/* y [rows, stride] = x W^T + bias, or y += x W^T + bias, for the rows of a plan; NULL: `rows` rows without corrections.
   To be called by all members, who meet at the end. */
static void linear(team *t, const work *w, const plan *p, const kv_linear *l, const number *x, ptrdiff_t x_stride,
                   float *y, ptrdiff_t y_stride, int rows, int add) {
    int panels = padded(l->outputs) / LANES, inputs = (l->inputs + PAIRED) / (1 + PAIRED) * (1 + PAIRED);
    size_t panel = (size_t)inputs * LANES;
    int chunk = rows <= ROWS_AT_ONCE ? ROWS_AT_ONCE : CHUNK_ROWS, chunks = (rows + chunk - 1) / chunk;
    int some = (int)(TASK_BYTES / (panel * sizeof(weight))) / MOST_PANELS * MOST_PANELS;
    if (some < MOST_PANELS) some = MOST_PANELS;
    int tasks = (panels + some - 1) / some * chunks;
    for (int task; (task = team_take(t)) < tasks;) {
        int row = task % chunks * chunk, first = task / chunks * some;
        int count = least(some, panels - first), many = least(chunk, rows - row);
        float *to = y + row * y_stride + first * LANES;
        packed_rows(x + row * x_stride, x_stride, many, (const weight *)l->weight + first * panel, panel, count,
                    LANES * (1 + PAIRED), inputs, NULL, 0, to, y_stride, add);
        if (l->bias != NULL)
            for (int r = 0; r < many; r++)
                for (int i = 0; i < count * LANES; i++) to[r * y_stride + i] += l->bias[first * LANES + i];
    }
    team_barrier(t);
    if (p != NULL && w->rank) correct(t, w, p, l, x, x_stride, y, y_stride);
}

/* What concerns one row. */

/* The sum of what sixteen lanes hold, always in this order. */
static float sum_of(const float *lanes) {
    float s[LANES];
    memcpy(s, lanes, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

static float sum_of_squares(const float *x, int width, float centre) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += (x[i + j] - centre) * (x[i + j] - centre);
    for (int j = 0; i + j < width; j++) lanes[j] += (x[i + j] - centre) * (x[i + j] - centre);
    return sum_of(lanes);
}

static float mean_of(const float *x, int width) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += x[i + j];
    for (int j = 0; i + j < width; j++) lanes[j] += x[i + j];
    return sum_of(lanes) / (float)width;
}

static float inverse_norm(float squares, int width, float eps) {
    return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(squares / (float)width + eps)));
}

/* Root mean square norm, or with a bias layer norm; what is written beyond the width is zero. */
static void norm(const float *x, const float *gain, const float *bias, number *to, int width, float eps) {
    float centre = bias != NULL ? mean_of(x, width) : 0.0f;
    float inverse = inverse_norm(sum_of_squares(x, width, centre), width, eps);
    for (int i = 0; i < width; i++)
        to[i] = to_number((x[i] - centre) * inverse * gain[i] + (bias != NULL ? bias[i] : 0.0f));
    for (int i = width; i < padded(width); i++) to[i] = to_number(0.0f);
}

static void norms(team *t, const work *w, const plan *p, const float *gain, const float *bias) {
    for (int row; (row = team_take(t)) < p->rows;)
        norm(w->x + (size_t)row * w->hidden, gain, bias, w->h + (size_t)row * w->hidden, w->m->hidden, w->m->eps);
    team_barrier(t);
}

static void embed(const work *w, int row) {
    const kv_model *m = w->m;
    int64_t id = w->c->ids[row];
    float *x = w->x + (size_t)row * w->hidden;
    const weight *from = (const weight *)m->embedding;
    if (m->tied) { /* a column of the packed head */
        int pair = 1 + PAIRED, inputs = (m->hidden + PAIRED) / pair * pair;
        from += id / LANES * inputs * LANES + id % LANES * pair;
        for (int i = 0; i < m->hidden; i++) x[i] = from_weight(from[i / pair * LANES * pair + i % pair]);
    } else {
        for (int i = 0; i < m->hidden; i++) x[i] = from_weight(from[id * m->hidden + i]);
    }
    if (m->positions != NULL) {
        const weight *place = (const weight *)m->positions + (size_t)w->all.position[row] * m->hidden;
        for (int i = 0; i < m->hidden; i++) x[i] += from_weight(place[i]);
    }
    for (int i = m->hidden; i < w->hidden; i++) x[i] = 0.0f;
}

static weight *plane(const work *w, int layer, int values, int head) {
    const kv_planes *k = &w->c->planes;
    return (weight *)k->blocks + layer * k->layer_stride + values * k->kind_stride + head * k->head_stride;
}

/* Where number i of position p of a block lies, by the kind of plane. */
static inline int key_at(int p, int i) { return PAIRED ? i / 2 * 2 * LANES + p * 2 + i % 2 : i * LANES + p; }
static inline int value_at(int p, int i, int head) { return PAIRED ? (p / 2 * head + i) * 2 + p % 2 : p * head + i; }

/* Norm and rotation of one head in place; halves are the pairs of rope. */
static void turn(const work *w, float *x, const float *gain, int position) {
    const kv_model *m = w->m;
    int half = m->head_dim / 2;
    if (gain != NULL) {
        float inverse = inverse_norm(sum_of_squares(x, m->head_dim, 0.0f), m->head_dim, m->eps);
        for (int i = 0; i < m->head_dim; i++) x[i] = x[i] * inverse * gain[i];
    }
    if (m->cosines == NULL) return;
    const float *c = m->cosines + (size_t)position * m->head_dim, *s = m->sines + (size_t)position * m->head_dim;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * c[i] + b * s[i];
        x[i + half] = b * c[i + half] + a * s[i + half];
    }
}

/* Queries, keys and values of a row: turned, rounded and put where attention reads them, by the plan that goes on. */
static void place(work *w, const plan *on, const kv_layer *l, int layer, int row) {
    const kv_model *m = w->m;
    int s = w->all.sequence[row], position = w->all.position[row], p = position % LANES, broken = 0;
    kv_sequence *one = &w->c->sequences[s];
    int block = one->table[position / LANES], last = position == one->first + one->rows - 1;
    int query_row = row - w->all.start[s] - (one->rows - on->count[s]); /* of the sequence; negative: not needed */
    float *t = w->t + (size_t)row * w->wide;
    for (int h = 0; h < m->heads + m->kv_heads; h++)
        turn(w, t + h * m->head_dim, h < m->heads ? l->query_gain : l->key_gain, position);
    for (int h = 0; h < m->heads && query_row >= 0; h++) {
        size_t at = ((size_t)(h / w->group) * on->rows + on->start[s] + query_row) * w->group + h % w->group;
        number *q = w->queries + at * w->head;
        for (int i = 0; i < w->head; i++) q[i] = to_number(i < m->head_dim ? t[h * m->head_dim + i] : 0.0f);
    }
    for (int h = 0; h < m->kv_heads; h++) {
        const float *key = t + (m->heads + h) * m->head_dim, *value = key + m->kv_heads * m->head_dim;
        weight *keys = plane(w, layer, 0, h) + (size_t)block * LANES * w->head;
        weight *values = plane(w, layer, 1, h) + (size_t)block * LANES * w->head;
        for (int i = 0; i < w->head; i++) {
            weight k = to_weight(i < m->head_dim ? key[i] : 0.0f), v = to_weight(i < m->head_dim ? value[i] : 0.0f);
            keys[key_at(p, i)] = k;
            values[value_at(p, i, w->head)] = v;
            broken |= !weight_is_finite(k) | !weight_is_finite(v);
        }
        for (int after = p + 1; last && after < LANES; after++) /* nothing stale within reach */
            for (int i = 0; i < w->head; i++) {
                keys[key_at(after, i)] = 0;
                values[value_at(after, i, w->head)] = 0;
            }
    }
    if (broken) __atomic_store_n(&one->broken, 1, __ATOMIC_RELAXED);
}

static void activate(const work *w, int row) {
    const kv_model *m = w->m;
    const float *t = w->t + (size_t)row * w->wide, *up = t + m->inner;
    number *to = w->gated + (size_t)row * w->inner;
    int n = m->inner;
    switch (m->activation + (m->gated ? 3 : 0)) {
    case KV_SILU: for (int i = 0; i < n; i++) to[i] = to_number(silu(t[i])); break;
    case KV_GELU: for (int i = 0; i < n; i++) to[i] = to_number(gelu(t[i])); break;
    case KV_GELU_TANH: for (int i = 0; i < n; i++) to[i] = to_number(gelu_tanh(t[i])); break;
    case 3 + KV_SILU: for (int i = 0; i < n; i++) to[i] = to_number(silu(t[i]) * up[i]); break;
    case 3 + KV_GELU: for (int i = 0; i < n; i++) to[i] = to_number(gelu(t[i]) * up[i]); break;
    default: for (int i = 0; i < n; i++) to[i] = to_number(gelu_tanh(t[i]) * up[i]);
    }
    for (int i = n; i < w->inner; i++) to[i] = to_number(0.0f);
}

#include "attention.h"

/* The step. */

/* Moves the rows that go on to the front; a row only ever moves ahead. */
static void keep_rows(const work *w, const plan *p) {
    for (int s = 0; s < w->c->num_sequences; s++) {
        int from = w->all.start[s] + w->all.count[s] - p->count[s];
        memmove(w->x + (size_t)p->start[s] * w->hidden, w->x + (size_t)from * w->hidden,
                (size_t)p->count[s] * w->hidden * sizeof *w->x);
    }
}

/* Goes on with the rows of plan `p`, to which all rows of the call have given keys and values. */
static void layer_of(team *t, int member, work *w, int layer, const plan *p) {
    const kv_layer *l = &w->m->layers[layer];
    int rows = w->all.rows;

    norms(t, w, &w->all, l->attention_gain, l->attention_bias);
    linear(t, w, &w->all, &l->qkv, w->h, w->hidden, w->t, w->wide, rows, 0);
    if (member == 0 && p->rows < rows) keep_rows(w, p); /* nobody reads them before the barrier */
    for (int row; (row = team_take(t)) < rows;) place(w, p, l, layer, row);
    team_barrier(t);
    if (p->rows == 0) return;
    attention(t, w, p, layer);
    linear(t, w, p, &l->output, w->attended, w->heads_width, w->x, w->hidden, p->rows, 1);
    norms(t, w, p, l->mlp_gain, l->mlp_bias);
    linear(t, w, p, &l->up, w->h, w->hidden, w->t, w->wide, p->rows, 0);
    for (int row; (row = team_take(t)) < p->rows;) activate(w, row);
    team_barrier(t);
    linear(t, w, p, &l->down, w->gated, w->inner, w->x, w->hidden, p->rows, 1);
}

static void run(team *t, int member, void *argument) {
    work *w = argument;
    const kv_model *m = w->m;
    const kv_call *c = w->c;
    unsigned control = _mm_getcsr();
    _mm_setcsr(0x1f80); /* round to nearest, keep denormal numbers, raise nothing */
    for (int row; (row = team_take(t)) < w->all.rows;) embed(w, row);
    team_barrier(t);
    for (int layer = 0; layer < m->num_layers && !w->cancelled; layer++) {
        layer_of(t, member, w, layer, layer == m->num_layers - 1 ? &w->scored : &w->all);
        if (c->watcher == NULL) continue;
        if (member == 0) w->cancelled = !c->watcher(layer);
        team_barrier(t);
    }
    int scored = w->scored.rows, wide = padded(m->head.outputs);
    if (scored && !w->cancelled) {
        norms(t, w, &w->scored, m->final_gain, m->final_bias);
        linear(t, w, NULL, &m->head, w->h, w->hidden, c->scores, wide, scored, 0);
        for (int row; (row = team_take(t)) < scored;) {
            int broken = 0;
            for (int i = 0; i < m->head.outputs; i++) broken |= !is_finite(c->scores[(size_t)row * wide + i]);
            if (broken) __atomic_store_n(&c->sequences[w->scored.sequence[row]].broken, 1, __ATOMIC_RELAXED);
        }
    }
    _mm_setcsr(control);
}

#define NAMED_(what, variant, dtype) kv_##what##_##variant##_##dtype
#define NAMED(what, variant, dtype) NAMED_(what, variant, dtype)

int NAMED(step, VARIANT, DTYPE)(const kv_call *c) {
    work w = {0};
    int broken = 0;
    uintptr_t end = lay_out(&w, c, (uintptr_t)c->scratch);
    team_run(c->threads, run, &w);
    ASAN_UNPOISON_MEMORY_REGION(c->scratch, end - (uintptr_t)c->scratch);
    for (int s = 0; s < c->num_sequences; s++) broken |= c->sequences[s].broken;
    return w.cancelled ? KV_CANCELLED : broken ? KV_NONFINITE : KV_DONE;
}

size_t NAMED(scratch, VARIANT, DTYPE)(const kv_call *c) {
    work w = {0};
    return lay_out(&w, c, 0);
}

/* One product alone, as a step makes it: what a packed weight is tested by. x [rows, padded K] is rounded in `rounded`. */

typedef struct {
    const kv_linear *linear;
    const number *x;
    float *y;
    int rows;
} product;

static void run_product(team *t, int member, void *argument) {
    const product *p = argument;
    work none = {0};
    unsigned control = _mm_getcsr();
    (void)member;
    _mm_setcsr(0x1f80);
    linear(t, &none, NULL, p->linear, p->x, padded(p->linear->inputs), p->y, padded(p->linear->outputs), p->rows, 0);
    _mm_setcsr(control);
}

void NAMED(product, VARIANT, DTYPE)(const kv_linear *l, const float *x, void *rounded, float *y, int32_t rows,
                                    int32_t threads) {
    number *numbers = rounded;
    for (size_t i = 0; i < (size_t)rows * padded(l->inputs); i++) numbers[i] = to_number(x[i]);
    product p = {.linear = l, .x = numbers, .y = y, .rows = rows};
    team_run(threads, run_product, &p);
}
