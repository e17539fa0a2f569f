/* What does not depend on the instruction set: which of the variants run here, what was built, and packing. */
#include <stdint.h>
#include <string.h>

#include "step.h"
#include "team.h"

int32_t kv_variants(void) {
    __builtin_cpu_init(); /* looks at what the system saves of the registers, too */
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    return avx2 | avx512 << 1 | bf16 << 2;
}

void kv_struct_bytes(int32_t bytes[7]) {
    bytes[0] = sizeof(kv_lora);
    bytes[1] = sizeof(kv_linear);
    bytes[2] = sizeof(kv_layer);
    bytes[3] = sizeof(kv_model);
    bytes[4] = sizeof(kv_planes);
    bytes[5] = sizeof(kv_sequence);
    bytes[6] = sizeof(kv_call);
}

const char *kv_sources(void) { return KV_SOURCES; }
const char *kv_build(void) { return KV_BUILD; }

typedef struct {
    const char *weight;
    char *packed;
    int32_t outputs, inputs, dtype;
} packing;

/* One panel of LANES outputs, of which `many` exist: numbers of `size` bytes, `together` of a row side by side. */
static void pack_panel(const char *from, char *to, int many, int inputs, int size, int together) {
    int whole = (inputs + together - 1) / together * together;
    if (many < LANES || whole != inputs) memset(to, 0, (size_t)whole * LANES * size);
    for (int k = 0; k < inputs; k += together) {
        int take = inputs - k < together ? inputs - k : together;
        for (int n = 0; n < many; n++)
            memcpy(to + ((size_t)k * LANES + n * together) * size, from + ((size_t)n * inputs + k) * size,
                   (size_t)take * size);
    }
}

static void pack(team *t, int member, void *argument) {
    const packing *p = argument;
    int size = p->dtype == KV_F32 ? 4 : 2, together = p->dtype == KV_BF16 ? 2 : 1;
    size_t whole = (size_t)(p->inputs + together - 1) / together * together;
    (void)member;
    for (int first; (first = LANES * team_take(t)) < p->outputs;) {
        const char *from = p->weight + (size_t)first * p->inputs * size;
        char *to = p->packed + first * whole * size;
        int many = p->outputs - first < LANES ? p->outputs - first : LANES;
        if (p->dtype == KV_F16) pack_panel(from, to, many, p->inputs, 2, 1); /* constants: the copies are moves */
        else if (together == 2) pack_panel(from, to, many, p->inputs, 2, 2);
        else pack_panel(from, to, many, p->inputs, 4, 1);
    }
}

void kv_pack(const void *weight, void *packed, int32_t outputs, int32_t inputs, int32_t dtype, int32_t threads) {
    packing p = {.weight = weight, .packed = packed, .outputs = outputs, .inputs = inputs, .dtype = dtype};
    team_run(threads, pack, &p);
}
