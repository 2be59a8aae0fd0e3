// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "event_format.h"

void read_field(const char *format_path, const char *name, struct driver_field *field)
{
	FILE *file = *name ? fopen(format_path, "re") : NULL;
	char line[256], wanted[64];

	snprintf(wanted, sizeof(wanted), " %s;", name);
	while (file && fgets(line, sizeof(line), file)) {
		char *place = strstr(line, wanted), *offset = place ? strstr(place, "offset:") : NULL;
		char *size = offset ? strstr(offset, "size:") : NULL;

		if (!size)
			continue;
		field->is_text = strstr(line, "__data_loc") != NULL;
		field->offset = atoi(offset + strlen("offset:"));
		field->width = field->is_text ? (int)sizeof(u64) : atoi(size + strlen("size:"));
	}
	if (file)
		fclose(file);
}
