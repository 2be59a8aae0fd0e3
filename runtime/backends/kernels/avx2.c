/* SPDX-License-Identifier: Apache-2.0 */
/* The product on AVX2: sums products of bytes in 16 bits, which four-bit codes never overflow. */
#include "product.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define BYTE_SHIFT 128
#define LANES 8
#define INLINE TARGET static inline __attribute__((always_inline))

#include "vectors.h"

INLINE __m256i in_32_bits(__m256i sums)
{
	return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

/* 2 * 2 * 15 * 127 fits into 16 bits. */
INLINE __m256i dot_codes(__m256i sum, __m256i low, __m256i high, __m256i odd, __m256i even)
{
	__m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd));

	return _mm256_add_epi32(sum, in_32_bits(both));
}

/* Two products of signed bytes fit into 16 bits, 2 * 128 * 127; the sign is moved to the row's code. */
INLINE __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x)
{
	__m256i shifted = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
	__m256i both = _mm256_maddubs_epi16(_mm256_abs_epi8(shifted), _mm256_sign_epi8(x, shifted));

	return _mm256_add_epi32(sum, in_32_bits(both));
}

/* A run is 16 bytes of a row: at 4 bits, 16 products per half lane, 16 * 15 * 127, fit into 16 bits. */
INLINE ints begin_run(size_t bits, ints dots)
{
	return bits == 4 ? zero_ints() : dots;
}

INLINE ints add_run(size_t bits, ints sums, ints codes, ints x)
{
	sums = bits == 4 ? _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x)) : dot_bytes(sums, codes, x);
	/* Otherwise the compiler sums in another order, for which there are too few registers. */
	__asm__("" : "+x"(sums));
	return sums;
}

INLINE ints end_run(size_t bits, ints dots, ints sums)
{
	return bits == 4 ? _mm256_add_epi32(dots, in_32_bits(sums)) : sums;
}

#include "x86.h"

static bool available(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const struct instruction_set set_avx2 = { "avx2", available, quantize, columns, 1, 0 };
#endif
