/* SPDX-License-Identifier: Apache-2.0 */
/* The ways of an instruction set: few_rows() and tiled(), defined before, for each number of bits and bytes of a block. */
/*
 * Two functions for each number of bits and bytes of a block, which are compile-time constants. Tiles have a separate function:
 * with both in one, the compiler has fewer registers for the loop of few rows.
 */
#define WAY(bits, bytes)                                                                                      \
	TILE_TARGET static __attribute__((noinline)) bool tiles_##bits##_##bytes(const struct product *p, size_t first, size_t end) \
	{                                                                                                     \
		return tiled(p, bits, bytes, first, end);                                                     \
	}                                                                                                     \
	TARGET static void way_##bits##_##bytes(const struct product *p, size_t first, size_t end)            \
	{                                                                                                     \
		if (p->m < MIN_TILED || !tiles_##bits##_##bytes(p, first, end))                               \
			few_rows(p, bits, bytes, first, end);                                                 \
	}
WAY(4, 8)
WAY(4, 16)
WAY(4, 32)
WAY(4, 64)
WAY(4, 128)
WAY(8, 16)
WAY(8, 32)
WAY(8, 64)
WAY(8, 128)
WAY(8, 256)

static void columns(const struct product *p, size_t first, size_t end)
{
	static void (*const ways[2][5])(const struct product *, size_t, size_t) = {
		{ way_4_8, way_4_16, way_4_32, way_4_64, way_4_128 },
		{ way_8_16, way_8_32, way_8_64, way_8_128, way_8_256 },
	};

	ways[p->bits == 8][__builtin_ctzl(p->block / 16)](p, first, end);
}
