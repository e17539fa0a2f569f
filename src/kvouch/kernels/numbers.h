/* Functions of one number by IEEE operations alone, so that the same bits come out however the compiler vectorises the
   loops around them, and no libm has a say. Written without branches for that reason. */
#ifndef KVOUCH_NUMBERS_H
#define KVOUCH_NUMBERS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float magnitude(float x) { return from_bits(bits_of(x) & 0x7fffffffu); }

static inline int is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

/* e^x for x <= 0, with a relative error under 2 units in the last place; below -87 it is 0, and NaN stays NaN.
   x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7, whose next term is under 6e-9. */
static inline float exp_below_zero(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest whole number in the low bits */
    int none = x < -87.0f;
    x = none ? -87.0f : x;
    float shifted = x * 1.44269504f + shift;
    float n = shifted - shift;
    float r = __builtin_fmaf(n, -0.693359375f, x); /* ln 2 in two parts: the first product is exact */
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.0f / 5040.0f;
    p = __builtin_fmaf(p, r, 1.0f / 720.0f);
    p = __builtin_fmaf(p, r, 1.0f / 120.0f);
    p = __builtin_fmaf(p, r, 1.0f / 24.0f);
    p = __builtin_fmaf(p, r, 1.0f / 6.0f);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    p *= from_bits((bits_of(shifted) - bits_of(shift) + 127u) << 23);
    return none ? 0.0f : p;
}

static inline float sigmoid(float x) {
    float e = exp_below_zero(-magnitude(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

/* The normal distribution up to x, with a relative error under 1e-6 down to x = -8: erfc(a) = e^(-a^2) q(t) with
   a = |x| / sqrt 2 and t = 1 / (1 + a / 2); q is fitted to within 4e-8 of its size on a in [0, 9.3]. */
static inline float normal_below(float x) {
    float a = magnitude(x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * a);
    float q = -0.054510545f;
    q = __builtin_fmaf(q, t, 0.26097405f);
    q = __builtin_fmaf(q, t, -0.434623659f);
    q = __builtin_fmaf(q, t, 0.212122351f);
    q = __builtin_fmaf(q, t, 0.024531763f);
    q = __builtin_fmaf(q, t, 0.177315354f);
    q = __builtin_fmaf(q, t, 0.251122683f);
    q = __builtin_fmaf(q, t, 0.280822217f);
    q = __builtin_fmaf(q, t, 0.282253325f);
    q = __builtin_fmaf(q, t, -7.57560565e-06f);
    float half_tail = 0.5f * q * exp_below_zero(-a * a);
    return x >= 0.0f ? 1.0f - half_tail : half_tail;
}

static inline float silu(float x) { return x * sigmoid(x); }

static inline float gelu(float x) { return x * normal_below(x); }

/* tanh's approximation, written with the sigmoid that tanh is. */
static inline float gelu_tanh(float x) { return x * sigmoid(1.5957691f * (x + 0.044715f * (x * x * x))); }

static inline uint16_t to_bf16(float x) {
    uint32_t u = bits_of(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

static inline float from_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

#endif
