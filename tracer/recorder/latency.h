/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Learns a decode step's time online, by recursive least squares over context length and experts missed that discount older
 * steps: it grows nearly linearly with the context, and by about the same for every expert that has to be loaded.
 */
#ifndef MOESCOPE_LATENCY_H
#define MOESCOPE_LATENCY_H

#include "growing.h"
#include "types.h"

#define TERMS 3 /* constant, context in thousands of tokens, experts missed */

struct latency {
	double coefficients[TERMS]; /* s, s per 1000 tokens, s per miss */
	double typical[TERMS];	    /* discounted mean of the terms so far */
	double covariance[TERMS][TERMS];
	int steps;
	struct numbers errors; /* relative, of the latest predictions, in a ring */
	int next;
};

struct latency_error {
	int steps;
	double median, p90, bias; /* of the absolute value, and the mean; meaningless without steps */
};

void begin_latency(struct latency *latency);
void learn_step(struct latency *latency, u32 context, int missed, double seconds);
/* Seconds that a step's context and misses add compared with a typical step; 0 before enough steps were seen. */
double beyond_typical(const struct latency *latency, u32 context, int missed);
struct latency_error latency_error(const struct latency *latency);

#endif
