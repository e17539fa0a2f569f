/* Which rows a layer goes on with, how attention is cut into tasks, and where the buffers of a step lie. Belongs
   to forward.c, which defines its types. */

static inline int tiles_of(int end) { return (end + TILE - 1) / TILE; }

/* Whether two sequences see the whole of a tile, and it is one in memory. */
static int share(const kv_sequence *a, const kv_sequence *b, int tile) {
    int end = (tile + 1) * TILE - 1; /* the first position that sees all of it */
    size_t bytes = TILE_BLOCKS * sizeof *a->table;
    return a->first >= end && b->first >= end &&
           memcmp(a->table + tile * TILE_BLOCKS, b->table + tile * TILE_BLOCKS, bytes) == 0;
}

/* The last `scored` rows of each sequence, or all of them. */
static void make_plan(work *w, plan *p, int scored) {
    const kv_call *c = w->c;
    int slot = 0, most_tiles = 0, tables = 0;
    p->rows = p->num_spans = p->num_strips = p->num_spanned = 0;
    for (int s = 0; s < c->num_sequences; s++) {
        const kv_sequence *one = &c->sequences[s];
        int count = scored ? one->scored : one->rows, tiles = tiles_of(one->first + one->rows);
        int spanned = count && count * w->group <= ROW_BLOCK && tiles > 1;
        p->start[s] = p->rows;
        p->count[s] = count;
        p->first_slot[s] = spanned ? tables : -1;
        for (int k = 0; k < count; k++, p->rows++) {
            p->sequence[p->rows] = s;
            p->position[p->rows] = one->first + one->rows - count + k;
            if (spanned) p->spanned[p->num_spanned++] = p->rows;
        }
        if (spanned) {
            tables += tiles;
            most_tiles = tiles > most_tiles ? tiles : most_tiles;
        }
        for (int q = 0; !spanned && q < count * w->group; q += ROW_BLOCK)
            p->strips[p->num_strips++] =
                (strip){.sequence = s, .query = p->start[s] * w->group + q, .queries = least(ROW_BLOCK, count * w->group - q)};
    }
    for (int tile = 0; tile < most_tiles; tile++)
        for (int s = 0; s < c->num_sequences; s++) {
            if (p->first_slot[s] < 0 || tile >= tiles_of(c->sequences[s].first + c->sequences[s].rows)) continue;
            span *last = p->num_spans ? &p->spans[p->num_spans - 1] : NULL;
            if (last != NULL && last->tile == tile && last->row + last->rows == p->start[s] &&
                share(&c->sequences[last->sequence], &c->sequences[s], tile)) {
                last->rows += p->count[s];
            } else {
                p->spans[p->num_spans++] =
                    (span){.sequence = s, .tile = tile, .row = p->start[s], .rows = p->count[s], .slot = slot};
            }
            p->slots[p->first_slot[s] + tile] = slot;
            slot += p->count[s] * w->group;
        }
}

static int widest_rank(const kv_model *m) {
    int widest = 0;
    for (int l = 0; l < m->num_layers; l++) {
        const kv_linear *all[] = {&m->layers[l].qkv, &m->layers[l].output, &m->layers[l].up, &m->layers[l].down};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < all[i]->num_corrections; j++)
                if (all[i]->corrections[j].rank > widest) widest = all[i]->corrections[j].rank;
    }
    return widest;
}

static void *cut(uintptr_t *from, size_t bytes, int exists) {
    uintptr_t found = *from, end = found + (bytes + 63) / 64 * 64;
    if (GUARD && exists) ASAN_POISON_MEMORY_REGION((void *)end, GUARD);
    *from = end + GUARD;
    return (void *)found;
}

#define CUT(buffer, count) (buffer) = cut(&at, (size_t)(count) * sizeof *(buffer), exists)

/* Lays the buffers out from `base` on (0: to know how large they are) and returns where they end. */
static uintptr_t lay_out(work *w, const kv_call *c, uintptr_t base) {
    const kv_model *m = w->m = c->sequences[0].model;
    int qkv = padded(m->layers[0].qkv.outputs), up = padded(m->layers[0].up.outputs), exists = base != 0;
    int rows = 0, tiles = 0, strips = 0, scored = 0;
    uintptr_t at = base;
    w->c = c;
    w->group = m->heads / m->kv_heads;
    for (int s = 0; s < c->num_sequences; s++) {
        const kv_sequence *one = &c->sequences[s];
        int queries = one->rows * w->group, own = tiles_of(one->first + one->rows);
        rows += one->rows;
        scored += one->scored;
        tiles += own;
        strips += (queries + ROW_BLOCK - 1) / ROW_BLOCK;
        w->slots += least(queries, ROW_BLOCK) * own;
        if (s == 0 || one->model != c->sequences[s - 1].model) {
            int rank = padded(widest_rank(one->model));
            w->rank = rank > w->rank ? rank : w->rank;
        }
    }
    w->hidden = padded(m->hidden);
    w->head = padded(m->head_dim);
    w->heads_width = padded(m->heads * m->head_dim);
    w->inner = padded(m->inner);
    w->wide = qkv > up ? qkv : up;
    w->wide = w->wide > w->hidden ? w->wide : w->hidden;
    w->part = w->head + LANES;
    CUT(w->x, rows * (size_t)w->hidden);
    CUT(w->t, rows * (size_t)w->wide);
    CUT(w->h, rows * (size_t)w->hidden);
    CUT(w->attended, rows * (size_t)w->heads_width);
    CUT(w->gated, rows * (size_t)w->inner);
    CUT(w->queries, rows * (size_t)m->heads * w->head);
    CUT(w->parts, m->kv_heads * (size_t)w->slots * w->part);
    if (w->rank) {
        int input = w->hidden > w->heads_width ? w->hidden : w->heads_width;
        CUT(w->low, rows * (size_t)w->rank);
        CUT(w->correction, rows * (size_t)w->wide);
        CUT(w->plain_rows, rows * (size_t)(input > w->inner ? input : w->inner));
    }
    plan *plans[] = {&w->all, &w->scored};
    for (int i = 0; i < 2; i++) {
        plan *p = plans[i];
        CUT(p->sequence, rows);
        CUT(p->position, rows);
        CUT(p->start, c->num_sequences);
        CUT(p->count, c->num_sequences);
        CUT(p->spanned, rows);
        CUT(p->slots, tiles);
        CUT(p->first_slot, c->num_sequences);
        CUT(p->spans, tiles);
        CUT(p->strips, strips);
        if (exists) make_plan(w, p, i);
    }
    return at;
}
