/* Rows times packed panels: y [M, 16 C] = start + x [M, K] W^T, each output one sequential sum over K in fused
   multiply-adds. A row's bits therefore do not depend on M, on C, or on who else is computed beside it.

   Included once for each kind of weight, with PRODUCT (the name's prefix), ROW (a number of x), WEIGHT (a number of W)
   and KIND (below) defined; undefines them at the end. Panels are LANES outputs wide; PER vectors make one. */

#ifndef KVOUCH_VECTORS
#define KVOUCH_VECTORS
#define FROM_F32 0
#define FROM_F16 1
#define FROM_BF16 2 /* each half of a pair widened and multiplied */
#define DOT_BF16 3  /* both by one instruction, with rows in bf16 */

#ifdef __AVX512F__
typedef __m512 vector;
enum { WIDTH = 16, PER = LANES / WIDTH };
#define V_LOAD _mm512_loadu_ps
#define V_STORE _mm512_storeu_ps
#define V_ALL _mm512_set1_ps
#define V_ADD _mm512_add_ps
#define V_FMA _mm512_fmadd_ps
#define V_FROM_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define V_PAIRS(p) _mm512_loadu_si512((const void *)(p))
#define V_EVEN(pairs) _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))
#define V_ODD(pairs) _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)))
typedef __m512i vector_of_pairs;
#else
typedef __m256 vector;
enum { WIDTH = 8, PER = LANES / WIDTH };
#define V_LOAD _mm256_loadu_ps
#define V_STORE _mm256_storeu_ps
#define V_ALL _mm256_set1_ps
#define V_ADD _mm256_add_ps
#define V_FMA _mm256_fmadd_ps
#define V_FROM_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define V_PAIRS(p) _mm256_loadu_si256((const void *)(p))
#define V_EVEN(pairs) _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))
#define V_ODD(pairs) _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)))
typedef __m256i vector_of_pairs;
#endif

enum { ROWS_AT_ONCE = 6, MOST_PANELS = 4 };
enum { AHEAD = 1024 }; /* numbers of a panel */

/* As many panels at once as the registers hold beside the sums of so many rows. */
static inline int panels_at_once(int rows) {
    if (WIDTH == 16 || rows == 1) return MOST_PANELS;
    return rows <= 3 ? 2 : 1;
}

#define INLINE static inline __attribute__((always_inline))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#endif

/* x and y have rows `x_stride` and `y_stride` numbers apart. panels[c] is where panel c begins; from one (pair of) k to
   the next it goes on by `step` numbers. The sums start from start[m * start_stride + 16 c] (NULL: from zero) and are
   stored, or added to what is in y. Of the C panels the first `used` are stored. `ahead`: the weights come from memory,
   which is asked for them early. */
INLINE void JOIN(PRODUCT, block)(const int M, const int C, const ROW *x, ptrdiff_t x_stride, const WEIGHT *const *panels,
                                 ptrdiff_t step, int inputs, const float *start, ptrdiff_t start_stride, float *y,
                                 ptrdiff_t y_stride, int used, int add, int ahead) {
    vector sums[ROWS_AT_ONCE][MOST_PANELS * PER];
    const WEIGHT *at[MOST_PANELS];
    for (int c = 0; c < C; c++) at[c] = panels[c];
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++)
            for (int v = 0; v < PER; v++)
                sums[m][c * PER + v] = start == NULL
                                           ? V_ALL(0.0f)
                                           : V_LOAD(start + m * start_stride + (c < used ? c : 0) * LANES + v * WIDTH);
    const int pairs = KIND == FROM_BF16 || KIND == DOT_BF16;
    for (int k = 0; k < inputs; k += 1 + pairs) {
#if KIND == DOT_BF16
        vector_of_pairs weights[MOST_PANELS * PER];
        for (int c = 0; c < C; c++)
            for (int v = 0; v < PER; v++) weights[c * PER + v] = V_PAIRS(at[c] + v * WIDTH * 2);
        for (int m = 0; m < M; m++) {
            int32_t pair;
            memcpy(&pair, x + m * x_stride + k, sizeof pair);
            for (int v = 0; v < C * PER; v++)
                sums[m][v] = _mm512_dpbf16_ps(sums[m][v], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights[v]);
        }
#else
        for (int half = 0; half < 1 + pairs; half++) {
            vector weights[MOST_PANELS * PER];
            for (int c = 0; c < C; c++)
                for (int v = 0; v < PER; v++) {
#if KIND == FROM_F32
                    weights[c * PER + v] = V_LOAD(at[c] + v * WIDTH);
#elif KIND == FROM_F16
                    weights[c * PER + v] = V_FROM_F16(at[c] + v * WIDTH);
#else
                    vector_of_pairs both = V_PAIRS(at[c] + v * WIDTH * 2);
                    weights[c * PER + v] = half ? V_ODD(both) : V_EVEN(both);
#endif
                }
            for (int m = 0; m < M; m++) {
                vector number = V_ALL(x[m * x_stride + k + half]);
                for (int v = 0; v < C * PER; v++) sums[m][v] = V_FMA(number, weights[v], sums[m][v]);
            }
        }
#endif
        for (int c = 0; c < C; c++) {
            if (ahead) _mm_prefetch((const void *)(at[c] + AHEAD), _MM_HINT_T0);
            at[c] += step;
        }
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++)
            for (int v = 0; v < PER; v++) {
                float *to = y + m * y_stride + c * LANES + v * WIDTH;
                if (c < used) V_STORE(to, add ? V_ADD(V_LOAD(to), sums[m][c * PER + v]) : sums[m][c * PER + v]);
            }
}

/* The same for any number of rows and `count` panels, `panel_stride` numbers apart from `panels` on. */
static __attribute__((noinline)) void JOIN(PRODUCT, rows)(const ROW *x, ptrdiff_t x_stride, int rows,
                                                          const WEIGHT *panels, ptrdiff_t panel_stride, int count,
                                                          ptrdiff_t step, int inputs, const float *start,
                                                          ptrdiff_t start_stride, float *y, ptrdiff_t y_stride,
                                                          int add) {
    for (int row = 0, m; row < rows; row += m) { /* eight are four and four: two alone would starve the multipliers */
        int blocks = (rows - row + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        m = (rows - row + blocks - 1) / blocks;
        int together = panels_at_once(m);
        const ROW *from = x + row * x_stride;
        for (int c = 0; c < count; c += together) {
            const WEIGHT *at[MOST_PANELS];
            int used = count - c < together ? count - c : together;
            for (int i = 0; i < together; i++) at[i] = panels + (c + (i < used ? i : 0)) * panel_stride;
            float *to = y + row * y_stride + c * LANES;
            const float *begin = start == NULL ? NULL : start + row * start_stride + c * LANES;
#define CASE(M)                                                                                                        \
    case M:                                                                                                            \
        JOIN(PRODUCT, block)                                                                                           \
        (M, WIDTH == 16 || M == 1 ? MOST_PANELS : M <= 3 ? 2 : 1, from, x_stride, at, step, inputs, begin, start_stride, \
         to, y_stride, used, add, row == 0);                                                                                     \
        break;
            switch (m) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
        }
    }
}

#undef PRODUCT
#undef ROW
#undef WEIGHT
#undef KIND
