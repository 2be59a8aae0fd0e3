/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles in vectors of LANES columns, eight or sixteen, as x86.h requires of every instruction set. */
#if LANES == 16
typedef __m512i ints;
typedef __m512 floats;
#define VECTOR(operation) _mm512_##operation
#define WHOLE(operation) _mm512_##operation##_si512
#else
typedef __m256i ints;
typedef __m256 floats;
#define VECTOR(operation) _mm256_##operation
#define WHOLE(operation) _mm256_##operation##_si256
#endif

INLINE ints zero_ints(void)
{
	return WHOLE(setzero)();
}

INLINE floats zero_floats(void)
{
	return VECTOR(setzero_ps)();
}

INLINE ints load_ints(const void *from)
{
	return WHOLE(load)(from);
}

INLINE floats load_floats(const float *from)
{
	return VECTOR(load_ps)(from);
}

INLINE void store_floats(float *to, floats value)
{
	VECTOR(storeu_ps)(to, value);
}

INLINE ints repeat_int(int32_t value)
{
	return VECTOR(set1_epi32)(value);
}

INLINE ints repeat_four(const int8_t *codes)
{
	int32_t four;

	memcpy(&four, codes, sizeof(four));
	return repeat_int(four);
}

INLINE floats repeat_float(float value)
{
	return VECTOR(set1_ps)(value);
}

INLINE floats add_floats(floats a, floats b)
{
	return VECTOR(add_ps)(a, b);
}

INLINE floats multiply_floats(floats a, floats b)
{
	return VECTOR(mul_ps)(a, b);
}

INLINE ints times_ints(size_t bits, ints zeros, ints sums)
{
	return bits == 4 ? VECTOR(madd_epi16)(zeros, sums) : VECTOR(mullo_epi32)(zeros, sums);
}

/* dots * scales + lanes */
INLINE floats add_scaled(ints dots, floats scales, floats lanes)
{
	return VECTOR(fmadd_ps)(VECTOR(cvtepi32_ps)(dots), scales, lanes);
}
