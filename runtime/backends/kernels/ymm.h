/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles in vectors of eight columns: what x86.h wants of AVX2 and AVX-VNNI. */
#define LANES 8

typedef __m256i ints;
typedef __m256 floats;

INLINE ints zero_ints(void)
{
	return _mm256_setzero_si256();
}

INLINE floats zero_floats(void)
{
	return _mm256_setzero_ps();
}

INLINE ints load_ints(const void *from)
{
	return _mm256_load_si256(from);
}

INLINE floats load_floats(const float *from)
{
	return _mm256_load_ps(from);
}

INLINE void store_floats(float *to, floats value)
{
	_mm256_storeu_ps(to, value);
}

INLINE ints repeat_int(int32_t value)
{
	return _mm256_set1_epi32(value);
}

INLINE ints repeat_four(const int8_t *codes)
{
	int32_t four;

	memcpy(&four, codes, sizeof(four));
	return _mm256_set1_epi32(four);
}

INLINE floats repeat_float(float value)
{
	return _mm256_set1_ps(value);
}

INLINE floats add_floats(floats a, floats b)
{
	return _mm256_add_ps(a, b);
}

INLINE floats multiply_floats(floats a, floats b)
{
	return _mm256_mul_ps(a, b);
}

INLINE ints times_ints(size_t bits, ints zeros, ints sums)
{
	return bits == 4 ? _mm256_madd_epi16(zeros, sums) : _mm256_mullo_epi32(zeros, sums);
}

/* (dots - offsets) * scales + lanes */
INLINE floats add_scaled(ints dots, ints offsets, floats scales, floats lanes)
{
	return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(dots, offsets)), scales, lanes);
}
