/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Arrays that grow: a struct with `rows`, `count` and `room`. Their memory is kept from turn to turn. */
#ifndef MOESCOPE_GROWING_H
#define MOESCOPE_GROWING_H

#include <stddef.h>

/* `rows` with room for `needed` rows of `size` bytes; ends the recorder if there is no memory. */
void *with_room(void *rows, int *room, int needed, size_t size);

/* The next, uninitialised row of an array. */
#define ADD(array) \
	((array)->rows = with_room((array)->rows, &(array)->room, (array)->count + 1, sizeof(*(array)->rows)), \
	 &(array)->rows[(array)->count++])

struct numbers {
	double *rows;
	int count, room;
};

void add_number(struct numbers *numbers, double value);
double median(struct numbers *numbers);			     /* sorts them; 0 if there are none */
double quantile(const struct numbers *sorted, double share); /* between neighbours linearly, as NumPy does */
void sort_numbers(struct numbers *numbers);

#endif
