/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of x86.h for sets that add four products of bytes to a lane by one instruction: `dot_bytes`, `add_run`. */
INLINE __m256i dot_codes(__m256i sum, __m256i low, __m256i high, __m256i odd, __m256i even)
{
	return dot_bytes(dot_bytes(sum, low, even), high, odd);
}

INLINE ints begin_run(size_t bits, ints dots)
{
	return dots;
}

INLINE ints end_run(size_t bits, ints dots, ints sums)
{
	return sums;
}
