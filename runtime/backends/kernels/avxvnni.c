/* SPDX-License-Identifier: Apache-2.0 */
/* The product on AVX-VNNI: four products of bytes are added to a lane by one instruction. */
#include "product.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define BYTE_SHIFT 0
#define LANES 8
#define INLINE TARGET static inline __attribute__((always_inline))

#include "vectors.h"

INLINE __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x)
{
	return _mm256_dpbusd_avx_epi32(sum, codes, x);
}

INLINE ints add_run(size_t bits, ints sums, ints codes, ints x)
{
	return dot_bytes(sums, codes, x);
}

#include "vnni.h"
#include "x86.h"

static bool available(void)
{
	unsigned int eax, ebx, ecx, edx;

	__builtin_cpu_init();
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
	       __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & 1 << 4;
}

const struct instruction_set set_avxvnni = { "avxvnni", available, quantize, columns, 1, 0 };
#endif
