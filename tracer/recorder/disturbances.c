// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* When the placing of probes disturbed the target. */
#include "recorder.h"

#define NEAR_NS 20000000ULL /* disturbances that are closer become one */

static json_t *placing;

json_t *disturbance(u64 begin, u64 end, const char *reason)
{
	return json_pack("{sI sI ss}", "begin_ns", (json_int_t)begin, "end_ns", (json_int_t)end, "reason", reason);
}

void disturbed_since(u64 begin)
{
	u64 now = now_ns();
	json_t *last;

	if (!placing)
		placing = json_array();
	last = json_array_get(placing, json_array_size(placing) - 1);
	if (!last || begin > (u64)number_of(last, "end_ns") + NEAR_NS) {
		json_array_append_new(placing, disturbance(begin, now, "placing probes"));
		return;
	}
	if (begin < (u64)number_of(last, "begin_ns"))
		json_object_set_new(last, "begin_ns", json_integer(begin));
	json_object_set_new(last, "end_ns", json_integer(now));
}

json_t *placing_times(void)
{
	return placing ? json_copy(placing) : json_array();
}
