/*
 * What llama.cpp's Hexagon backend needs of FastRPC's public interface (github.com/qualcomm/fastrpc, folder inc): names, numbers and
 * layouts, so that backend and stand-in build where no Hexagon SDK is.
 */
#ifndef MOESCOPE_FASTRPC_H
#define MOESCOPE_FASTRPC_H

#include <stddef.h>
#include <stdint.h>

typedef int AEEResult;
#define AEE_EOFFSET 0
#define AEE_SUCCESS 0
#define AEE_EUNABLETOLOAD 0x6
#define AEE_EBADPARM 0xe
#define AEE_EUNSUPPORTEDAPI 0x6c
#define AEE_EEXPIRED 0xc
#define AEE_EWOULDBLOCK 516

#define CDSP_DOMAIN_ID 3
#define CDSP_DOMAIN_NAME "cdsp"
#define RPCMEM_HEAP_ID_SYSTEM 25
#define RPCMEM_DEFAULT_FLAGS 1

typedef uint32_t remote_handle;
typedef uint64_t remote_handle64;

typedef union {
	struct {
		void *pv;
		size_t nLen;
	} buf;
	remote_handle h;
	remote_handle64 h64;
} remote_arg;

/* A call's method and how many buffers it takes and gives. */
#define REMOTE_SCALARS_MAKE(method, in, out) (((uint32_t)(method)&0x1f) << 24 | ((in)&0xff) << 16 | ((out)&0xff) << 8)
#define REMOTE_SCALARS_METHOD(scalars) ((scalars) >> 24 & 0x1f)

enum fastrpc_map_flags {
	FASTRPC_MAP_FD = 2,
	FASTRPC_MAP_FD_DELAYED = 3,
	FASTRPC_MAP_FD_DELAYED_EXTENDED = 5,
};

enum {
	DSPRPC_CONTROL_LATENCY = 1,
	DSPRPC_GET_DSP_INFO = 2,
	DSPRPC_CONTROL_UNSIGNED_MODULE = 2,
	FASTRPC_RESERVE_NEW_SESSION = 8,
	FASTRPC_GET_EFFECTIVE_DOMAIN_ID = 9,
	FASTRPC_GET_URI = 10,
};

enum {
	ARCH_VER = 6,
};

struct remote_rpc_control_latency {
	uint32_t enable, latency;
};

struct remote_rpc_control_unsigned_module {
	int domain, enable;
};

typedef struct remote_dsp_capability {
	uint32_t domain, attribute_ID, capability;
} remote_dsp_capability;

struct remote_rpc_reserve_new_session {
	char *domain_name;
	uint32_t domain_name_len;
	char *session_name;
	uint32_t session_name_len, effective_domain_id, session_id;
};

struct remote_rpc_effective_domain_id {
	char *domain_name;
	uint32_t domain_name_len, session_id, effective_domain_id;
};

struct remote_rpc_get_uri {
	char *domain_name;
	uint32_t domain_name_len, session_id;
	char *module_uri;
	uint32_t module_uri_len;
	char *uri;
	uint32_t uri_len;
};

/* Newer drivers list their processors; the stand-in has one, and does not. */
typedef struct {
	int id;
	char name[64];
	int type, status, instance_id;
} fastrpc_domain;

typedef struct {
	int id;
	struct {
		fastrpc_domain *domains;
		int max_domains, num_domains;
		unsigned long flags;
	} sys;
} system_req_payload;

#define FASTRPC_GET_DOMAINS 0
#define FASTRPC_NSP 1
#define DOMAINS_LIST_FLAGS_SET_TYPE(flags, type) ((flags) | (type))

typedef struct domain {
	int id;
	const char *uri;
} domain;
#ifdef __cplusplus
static domain supported_domains[] = {{CDSP_DOMAIN_ID, "&_dom=cdsp"}};
#endif

typedef struct dspqueue *dspqueue_t;
typedef void (*dspqueue_callback_t)(dspqueue_t, AEEResult, void *);

enum {
	DSPQUEUE_BUFFER_FLAG_FLUSH_SENDER = 0x10,
	DSPQUEUE_BUFFER_FLAG_INVALIDATE_RECIPIENT = 0x80,
};

struct dspqueue_buffer {
	uint32_t fd, size, offset, flags;
	union {
		void *ptr;
		uint64_t address;
	};
};

#ifdef __cplusplus
extern "C" {
#endif

void *rpcmem_alloc(int heap, uint32_t flags, int size);
void *rpcmem_alloc2(int heap, uint32_t flags, size_t size);
void rpcmem_free(void *base);
int rpcmem_to_fd(void *base);
int fastrpc_mmap(int domain, int fd, void *addr, int offset, size_t length, enum fastrpc_map_flags flags);
int fastrpc_munmap(int domain, int fd, void *addr, size_t length);
int remote_handle64_open(const char *name, remote_handle64 *handle);
int remote_handle64_invoke(remote_handle64 handle, uint32_t scalars, remote_arg *args);
int remote_handle64_close(remote_handle64 handle);
int remote_handle_control(uint32_t request, void *data, uint32_t length);
int remote_handle64_control(remote_handle64 handle, uint32_t request, void *data, uint32_t length);
int remote_session_control(uint32_t request, void *data, uint32_t length);
AEEResult dspqueue_create(int domain, uint32_t flags, uint32_t request_bytes, uint32_t response_bytes, dspqueue_callback_t packet,
			  dspqueue_callback_t error, void *context, dspqueue_t *queue);
AEEResult dspqueue_close(dspqueue_t queue);
AEEResult dspqueue_export(dspqueue_t queue, uint64_t *id);
AEEResult dspqueue_write(dspqueue_t queue, uint32_t flags, uint32_t n_buffers, struct dspqueue_buffer *buffers, uint32_t length,
			 const uint8_t *message, uint32_t timeout_us);
AEEResult dspqueue_read(dspqueue_t queue, uint32_t *flags, uint32_t max_buffers, uint32_t *n_buffers, struct dspqueue_buffer *buffers,
			uint32_t max_length, uint32_t *length, uint8_t *message, uint32_t timeout_us);
AEEResult dspqueue_read_noblock(dspqueue_t queue, uint32_t *flags, uint32_t max_buffers, uint32_t *n_buffers,
				struct dspqueue_buffer *buffers, uint32_t max_length, uint32_t *length, uint8_t *message);

#ifdef __cplusplus
}
#endif

#endif
