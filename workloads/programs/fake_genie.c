/* A libGenie.so that answers nothing but counts what it is asked: functions by Genie's public headers, with known results. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t u64;

static int queries;
static u64 made;

static int make(u64 *out)
{
	*out = 0x1000 + 16 * ++made;
	return 0;
}

#define CREATE(name) int name(void *config, u64 *out) { (void)config; return make(out); }
#define CALL(name, status) int name(u64 handle) { usleep(1000); return handle ? status : -1; }
CREATE(GenieDialog_create) CREATE(GeniePipeline_create) CREATE(GenieNode_create) CREATE(GenieEmbedding_create)
CALL(GenieDialog_free, 0) CALL(GeniePipeline_free, 0) CALL(GenieNode_free, 0) CALL(GenieEmbedding_free, 0)
CALL(GenieDialog_reset, 0) CALL(GeniePipeline_reset, 0) CALL(GenieNode_reset, 0)
CALL(GenieDialog_applyLora, 0) CALL(GenieNode_applyLora, 7) CALL(GenieNode_setData, 0) CALL(GenieNode_getData, 0)
CALL(GenieNode_execute, 0) CALL(GeniePipeline_execute, 0) CALL(GenieEmbedding_generate, 0)
CALL(GenieDialog_embeddingTokenQuery, 0) CALL(GenieDialog_batchQuery, 0) CALL(GenieDialog_tokenQuery, 3)

#define QUERY(name) int name(u64 dialog) { usleep(1000); queries++; return dialog ? 0 : -1; }
QUERY(GenieDialog_query) QUERY(GenieDialog_embeddingQuery)

/* Every query so far: the n-th took n ms to its first token. */
int GenieProfile_getJsonData(u64 profile, void (*allocate)(size_t, char **), char **out)
{
	char text[65536];
	int at = sprintf(text, "{\"components\": [{\"name\": \"dialog0\", \"type\": \"dialog\", \"events\": [");

	for (int i = 1; i <= queries; i++)
		at += sprintf(text + at, "%s{\"type\": \"GenieDialog_query\", \"duration\": %d, \"num-prompt-tokens\": {\"value\": %d, "
			      "\"unit\": \"\"}, \"time-to-first-token\": {\"value\": %d, \"unit\": \"us\"}, \"token-generation-rate\": "
			      "{\"value\": %d.5, \"unit\": \"%s\"}}", i > 1 ? ", " : "", 1500 + i, 10 * i, 1000 * i, 20 + i,
			      i == 2 ? "tokens per hour" : "toks/sec");
	at += sprintf(text + at, "]}]}");
	allocate(at + 1, out);
	memcpy(*out, text, at + 1);
	return profile ? 0 : -1;
}
