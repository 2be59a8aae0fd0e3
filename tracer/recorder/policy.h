/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Carries out what --min-tps and --max-overhead decide, and tells the manifest of them and of --only-slower-than. */
#ifndef MOESCOPE_POLICY_H
#define MOESCOPE_POLICY_H

#include "recorder.h"

void policy_begin(const struct choice *choice);
void policy_turn(void); /* after each turn of the drain */
u64 policy_due_ns(void); /* when the next turn is due at the latest */
void policy_end(void);
void add_to_progress(json_t *progress);
json_t *policies(void); /* members of the manifest */

#endif
