/* SPDX-License-Identifier: Apache-2.0 */
/* The product on AVX-512 VNNI: tiles in vectors of sixteen columns; few rows wait for memory, and eight lanes do. */
#include "product.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define BYTE_SHIFT 0
#define LANES 16
#define INLINE TARGET static inline __attribute__((always_inline))

typedef __m512i ints;
typedef __m512 floats;

INLINE __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x)
{
	return _mm256_dpbusd_epi32(sum, codes, x);
}

INLINE __m256i dot_codes(__m256i sum, __m256i low, __m256i high, __m256i odd, __m256i even)
{
	return dot_bytes(dot_bytes(sum, low, even), high, odd);
}

INLINE ints begin_run(size_t bits, ints dots)
{
	return dots;
}

INLINE ints add_run(size_t bits, ints sums, ints codes, ints x)
{
	return _mm512_dpbusd_epi32(sums, codes, x);
}

INLINE ints end_run(size_t bits, ints dots, ints sums)
{
	return sums;
}

INLINE ints zero_ints(void)
{
	return _mm512_setzero_si512();
}

INLINE floats zero_floats(void)
{
	return _mm512_setzero_ps();
}

INLINE ints load_ints(const void *from)
{
	return _mm512_load_si512(from);
}

INLINE floats load_floats(const float *from)
{
	return _mm512_load_ps(from);
}

INLINE void store_floats(float *to, floats value)
{
	_mm512_storeu_ps(to, value);
}

INLINE ints repeat_int(int32_t value)
{
	return _mm512_set1_epi32(value);
}

INLINE ints repeat_four(const int8_t *codes)
{
	int32_t four;

	memcpy(&four, codes, sizeof(four));
	return _mm512_set1_epi32(four);
}

INLINE floats repeat_float(float value)
{
	return _mm512_set1_ps(value);
}

INLINE floats add_floats(floats a, floats b)
{
	return _mm512_add_ps(a, b);
}

INLINE floats multiply_floats(floats a, floats b)
{
	return _mm512_mul_ps(a, b);
}

INLINE ints times_ints(size_t bits, ints zeros, ints sums)
{
	return bits == 4 ? _mm512_madd_epi16(zeros, sums) : _mm512_mullo_epi32(zeros, sums);
}

INLINE floats add_scaled(ints dots, ints offsets, floats scales, floats lanes)
{
	return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(dots, offsets)), scales, lanes);
}

#include "x86.h"

static bool available(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx512vl");
}

const struct instruction_set set_avx512vnni = { "avx512vnni", available, quantize, columns };
#endif
