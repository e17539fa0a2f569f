/* Attention over absolute tiles, merged in order. Belongs to forward.c, which defines its types and products.

   A part is what a row gets from one tile, or from several merged: output [head], largest score, mass. */

/* Of scores times a scale; n is a multiple of LANES. Minus infinity for n = 0. */
static float largest_of(const float *scores, int n, float scale) {
    float most[LANES], largest = -INFINITY;
    for (int j = 0; j < LANES; j++) most[j] = -INFINITY;
    for (int k = 0; k < n; k += LANES)
        for (int j = 0; j < LANES; j++) most[j] = scores[k + j] > most[j] ? scores[k + j] : most[j];
    for (int j = 0; j < LANES; j++) largest = most[j] > largest ? most[j] : largest;
    return largest * scale;
}

/* Scores become their exponentials under the largest; returns the sum of these. */
static float to_shares(float *scores, int n, float scale, float largest) {
    float lanes[LANES] = {0};
    for (int k = 0; k < n; k++) scores[k] = exp_below_zero(scores[k] * scale - largest);
    for (int k = 0; k < n; k += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += scores[k + j];
    return sum_of(lanes);
}

/* Asks for blocks that this thread will read next: few rows are computed faster than memory gives their keys. */
static inline void fetch(const weight *plane, const int32_t *next, int b, int run, int blocks, size_t block) {
    for (int i = b; i < b + run && i < blocks; i++)
        for (size_t k = 0; k < block; k += 64 / sizeof(weight))
            _mm_prefetch((const char *)(plane + next[i] * block + k), _MM_HINT_T1);
}

/* Parts of query rows [r, r + many) of a head over a tile of a sequence; rows that see nothing of it get mass 0. `next`:
   the `next_blocks` blocks of the tile that comes after it. */
static void attend_tile(const work *w, const plan *p, int layer, int head, int r, int many, int sequence, int tile,
                        const int32_t *next, int next_blocks, float *parts) {
    const int32_t *table = w->c->sequences[sequence].table + tile * TILE_BLOCKS;
    size_t block = (size_t)LANES * w->head;
    const number *queries = w->queries + ((size_t)head * p->rows * w->group + r) * w->head;
    const weight *keys = plane(w, layer, 0, head), *values = plane(w, layer, 1, head);
    int last = p->position[(r + many - 1) / w->group] - tile * TILE; /* in the tile: what the last row sees ends here */
    int blocks = last < 0 ? 0 : least(last / LANES + 1, TILE_BLOCKS);
    float scores[ROW_BLOCK * TILE], scale = 1.0f / sqrtf((float)w->m->head_dim);
    number shares[ROW_BLOCK * TILE];
    int most = next_blocks ? 2 : TILE_BLOCKS; /* blocks of one product */

    for (int run, b = 0; b < blocks; b += run) { /* neighbours in the table are one product */
        for (run = 1; run < most && b + run < blocks && table[b + run] == table[b] + run;) run++;
        fetch(keys, next, b, run, next_blocks, block);
        packed_rows(queries, w->head, many, keys + table[b] * block, block, run, LANES * (1 + PAIRED), w->head, NULL, 0,
                    scores + b * LANES, TILE, 0);
    }
    for (int i = 0; i < many; i++) {
        int seen = p->position[(r + i) / w->group] - tile * TILE + 1; /* keys [0, seen) of the tile */
        int whole = seen <= 0 ? 0 : least(padded(seen), TILE);
        float *s = scores + i * TILE;
        for (int k = seen < 0 ? 0 : seen; k < whole; k++) s[k] = -INFINITY; /* selected away: their shares are 0 */
        float largest = largest_of(s, whole, scale);
        parts[i * w->part + w->head] = largest;
        parts[i * w->part + w->head + 1] = to_shares(s, whole, scale, largest);
        for (int k = 0; k < whole; k++) shares[i * TILE + k] = to_number(s[k]);
        for (int k = whole; k < blocks * LANES; k++) shares[i * TILE + k] = to_number(0.0f);
    }
    for (int run, b = 0; b < blocks; b += run) {
        for (run = 1; run < most && b + run < blocks && table[b + run] == table[b] + run;) run++;
        fetch(values, next, b, run, next_blocks, block);
        packed_rows(shares + b * LANES, TILE, many, values + table[b] * block, LANES * (1 + PAIRED), w->head / LANES,
                    w->head * (1 + PAIRED), run * LANES, b ? parts : NULL, w->part, parts, w->part, 0);
    }
    for (int i = 0; i < many && blocks; i++) /* a sum that came to nothing is +0, however many zeros were added to it */
        for (int j = 0; j < w->head; j++) parts[i * w->part + j] += 0.0f;
}

/* Adds a later tile's part to that of the tiles before it. */
static void merge(const work *w, float *before, const float *tile) {
    float *largest = before + w->head, *mass = largest + 1;
    if (tile[w->head + 1] == 0.0f) return;
    if (*mass == 0.0f) {
        memcpy(before, tile, (w->head + 2) * sizeof(float));
        return;
    }
    float most = tile[w->head] > *largest ? tile[w->head] : *largest;
    float old = exp_below_zero(*largest - most), new = exp_below_zero(tile[w->head] - most);
    for (int i = 0; i < w->head; i++) before[i] = before[i] * old + tile[i] * new;
    *mass = *mass * old + tile[w->head + 1] * new;
    *largest = most;
}

static void finish(const work *w, int head, int r, const float *part) {
    int row = r / w->group, size = w->m->head_dim, all = w->m->heads * size, at = (head * w->group + r % w->group) * size;
    number *to = w->attended + (size_t)row * w->heads_width;
    float mass = part[w->head + 1];
    for (int i = 0; i < size; i++) to[at + i] = to_number(part[i] / mass);
    for (int i = all; at + size == all && i < w->heads_width; i++) to[i] = to_number(0.0f);
}

static void attend_strip(const work *w, const plan *p, int layer, int head, const strip *one) {
    float merged[ROW_BLOCK * (MOST_HEAD + LANES)], parts[ROW_BLOCK * (MOST_HEAD + LANES)];
    int tiles = p->position[(one->query + one->queries - 1) / w->group] / TILE + 1;
    for (int tile = 0; tile < tiles; tile++) {
        attend_tile(w, p, layer, head, one->query, one->queries, one->sequence, tile, NULL, 0, tile ? parts : merged);
        for (int i = 0; i < one->queries && tile; i++) merge(w, merged + i * w->part, parts + i * w->part);
    }
    for (int i = 0; i < one->queries; i++) finish(w, head, one->query + i, merged + i * w->part);
}

static inline float *parts_of(const work *w, int head, int slot) {
    return w->parts + ((size_t)head * w->slots + slot) * w->part;
}

static void attend_span(const work *w, const plan *p, int layer, int head, const span *one, const span *next) {
    const int32_t *table = NULL;
    int blocks = 0, queries = one->rows * w->group;
    if (next != NULL && queries <= ROWS_AT_ONCE) {
        const kv_sequence *its = &w->c->sequences[next->sequence];
        table = its->table + next->tile * TILE_BLOCKS;
        blocks = least((its->first + its->rows - 1) / LANES + 1 - next->tile * TILE_BLOCKS, TILE_BLOCKS);
    }
    for (int q = 0; q < queries; q += ROW_BLOCK)
        attend_tile(w, p, layer, head, one->row * w->group + q, least(ROW_BLOCK, queries - q), one->sequence, one->tile,
                    table, blocks, parts_of(w, head, one->slot + q));
}

static void merge_parts(const work *w, const plan *p, int head, int row, int of_group) {
    int s = p->sequence[row], at = (row - p->start[s]) * w->group + of_group;
    const int *slots = p->slots + p->first_slot[s];
    float *merged = parts_of(w, head, slots[0] + at);
    for (int tile = 1; tile <= p->position[row] / TILE; tile++) merge(w, merged, parts_of(w, head, slots[tile] + at));
    finish(w, head, row * w->group + of_group, merged);
}

/* A task is a strip, or for few rows one tile of them. The arithmetic is one. */
static void attention(team *t, const work *w, const plan *p, int layer) {
    int heads = w->m->kv_heads, strips = heads * p->num_strips, spans = p->num_spans, per_head = p->num_spanned * w->group;
    for (int task; (task = team_take(t)) < strips + heads * spans;) {
        if (task < strips) {
            attend_strip(w, p, layer, task / p->num_strips, &p->strips[task % p->num_strips]);
        } else {
            int number = (task - strips) % spans, after = number + w->c->threads;
            attend_span(w, p, layer, (task - strips) / spans, &p->spans[number],
                        after < spans ? &p->spans[after] : NULL);
        }
    }
    team_barrier(t);
    if (spans == 0) return;
    for (int task; (task = team_take(t)) < heads * per_head;) {
        int number = task % per_head;
        merge_parts(w, p, task / per_head, p->spanned[number / w->group], number % w->group);
    }
    team_barrier(t);
}
