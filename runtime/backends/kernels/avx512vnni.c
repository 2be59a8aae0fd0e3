/* SPDX-License-Identifier: Apache-2.0 */
/* The product on AVX-512 VNNI: tiles in vectors of sixteen columns; few rows are bound by memory, so eight lanes suffice. */
#include "product.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define BYTE_SHIFT 0
#define LANES 16
#define INLINE TARGET static inline __attribute__((always_inline))

#include "vectors.h"

INLINE __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x)
{
	return _mm256_dpbusd_epi32(sum, codes, x);
}

INLINE ints add_run(size_t bits, ints sums, ints codes, ints x)
{
	return _mm512_dpbusd_epi32(sums, codes, x);
}

#include "vnni.h"
#include "x86.h"

static bool available(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx512vl");
}

const struct instruction_set set_avx512vnni = { "avx512vnni", available, quantize, columns, 1, 0 };
#endif
