// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* XXH3 as 16 digits: of data, and of a file's content. */
#include <stdio.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "recorder.h"

void digest(const void *data, size_t bytes, char *text)
{
	sprintf(text, "%016llx", (unsigned long long)XXH3_64bits(data, bytes));
}

bool digest_file(int fd, s64 most, char *text)
{
	static u8 part[1 << 20];
	XXH3_state_t *hash = XXH3_createState();
	ssize_t bytes;
	s64 at = 0;

	XXH3_64bits_reset(hash);
	while (at <= most && (bytes = pread(fd, part, sizeof(part), at)) > 0) {
		XXH3_64bits_update(hash, part, bytes);
		at += bytes;
	}
	sprintf(text, "%016llx", (unsigned long long)XXH3_64bits_digest(hash));
	XXH3_freeState(hash);
	return at <= most;
}
