/* What crosses the border between Python and C. Every struct has its mirror in binding.py; kv_layout_bytes tells whether
   the two agree. Widths are in numbers, strides too; "padded" means rounded up to LANES. */
#ifndef KVOUCH_STEP_H
#define KVOUCH_STEP_H

#include <stddef.h>
#include <stdint.h>

enum { LANES = 16 };       /* outputs of a packed panel, positions of a cache block */
enum { TILE = 256 };       /* positions of an attention tile, as in contract.py */
enum { MOST_HEAD = 256 };  /* the largest head size */

enum kv_dtype { KV_F32, KV_BF16, KV_F16 };
enum kv_activation { KV_SILU, KV_GELU, KV_GELU_TANH };
enum kv_status { KV_DONE, KV_CANCELLED, KV_NONFINITE };

/* A low-rank correction of outputs [start, start + outputs): y += scale * (x A^T) B^T, both packed in float32. */
typedef struct {
    const float *a, *b; /* A [rank, K], B [outputs, rank] */
    int32_t rank, start, outputs;
    float scale;
} kv_lora;

/* y = x W^T + bias. W is packed: [N / 16][K / 2][16][2] in bf16, [N / 16][K][16] in fp32 and fp16; N padded to 16, K to
   2 in bf16, both with zeros. */
typedef struct {
    const void *weight;
    const float *bias; /* [padded N], or NULL */
    const kv_lora *corrections;
    int32_t inputs, outputs, num_corrections, unused;
} kv_linear;

/* Gains and biases of norms are float32; a NULL bias makes the norm a root mean square. */
typedef struct {
    const float *attention_gain, *attention_bias, *query_gain, *key_gain, *mlp_gain, *mlp_bias;
    kv_linear qkv, output, up, down; /* gated: the gate's outputs come first in `up` */
} kv_layer;

typedef struct {
    const kv_layer *layers;
    const void *embedding;       /* [V, hidden], or the packed head where it is tied */
    const void *positions;       /* learned [positions, hidden] in the weights' dtype, or NULL */
    const float *cosines, *sines; /* rope's [positions, D] with the first half of the sines negated, or NULL */
    const float *final_gain, *final_bias;
    kv_linear head;
    int32_t num_layers, hidden, heads, kv_heads, head_dim, inner;
    int32_t activation, gated, tied;
    float eps;
} kv_model;

/* Keys and values of all sequences: planes by layer, kind and head, each a row of blocks of 16 positions. A block of
   keys is [D / 2][16][2] in bf16 and [D][16] otherwise; of values [8][D][2] and [16][D]; D padded. */
typedef struct {
    void *blocks;
    int64_t layer_stride, kind_stride, head_stride;
} kv_planes;

/* One sequence's rows of a call: they stand at [first, first + rows). The models of a call differ in no weight but in
   the corrections of their layers. Neighbours whose tables begin alike share what they read there. */
typedef struct {
    const kv_model *model;
    const int32_t *table; /* the block of each 16 positions; those that are written to belong to this sequence alone */
    int32_t first, rows;
    int32_t scored; /* so many of the last rows get scores */
    int32_t broken; /* set where one of its numbers came out infinite or NaN */
} kv_sequence;

typedef int (*kv_watcher)(int32_t layer); /* asked between layers; 0 cancels, which is what ctypes gives for an error */

typedef struct {
    kv_planes planes;
    kv_sequence *sequences;
    const int64_t *ids; /* of each sequence in turn */
    float *scores;      /* [scored rows of each sequence in turn, padded V] */
    void *scratch;
    kv_watcher watcher; /* or NULL */
    int32_t num_sequences, threads;
} kv_call;

typedef int kv_step_function(const kv_call *);
typedef size_t kv_scratch_function(const kv_call *); /* bytes that such a call needs */
typedef void kv_product_function(const kv_linear *, const float *x, void *rounded, float *y, int32_t rows,
                                 int32_t threads);

/* One object a variant and dtype: forward.c, compiled with its own flags. */
#define KV_DECLARE(variant, dtype)                                                                                     \
    kv_step_function kv_step_##variant##_##dtype;                                                                      \
    kv_scratch_function kv_scratch_##variant##_##dtype;                                                                \
    kv_product_function kv_product_##variant##_##dtype;
KV_DECLARE(avx2, f32)
KV_DECLARE(avx2, bf16)
KV_DECLARE(avx2, f16)
KV_DECLARE(avx512, f32)
KV_DECLARE(avx512, bf16)
KV_DECLARE(avx512, f16)
KV_DECLARE(avx512_bf16, bf16)

/* Which variants this processor runs: bit 0 avx2, 1 avx512, 2 avx512_bf16. */
int32_t kv_variants(void);

/* Bytes of kv_lora, kv_linear, kv_layer, kv_model, kv_planes, kv_sequence, kv_call: mirrors of another build must not be
   used. */
void kv_struct_bytes(int32_t bytes[7]);

/* Digest of the sources, and of the sources with the compiler and its flags: 64 hexadecimal digits each. */
const char *kv_sources(void);
const char *kv_build(void);

/* Packs W [outputs, inputs] of a dtype into `packed`, which kv_linear describes. */
void kv_pack(const void *weight, void *packed, int32_t outputs, int32_t inputs, int32_t dtype, int32_t threads);

#endif
