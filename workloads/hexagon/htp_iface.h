/* The calls of ggml's htp_iface.idl, which the Hexagon SDK's compiler makes out of it; htp_iface.c has them for the stand-in. */
#ifndef MOESCOPE_HTP_IFACE_H
#define MOESCOPE_HTP_IFACE_H

#include <stdint.h>

#include "fastrpc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
	unsigned int events[8];
} htp_iface_pmu_conf;

int htp_iface_open(const char *uri, remote_handle64 *handle);
int htp_iface_close(remote_handle64 handle);
int htp_iface_start(remote_handle64 handle, unsigned int session, uint64_t queue, unsigned int n_hvx, unsigned int n_hmx, uint64_t max_vmem);
int htp_iface_stop(remote_handle64 handle);
int htp_iface_mmap(remote_handle64 handle, unsigned int fd, uint64_t size);
int htp_iface_munmap(remote_handle64 handle, unsigned int fd);
int htp_iface_profiler(remote_handle64 handle, unsigned int mode, const htp_iface_pmu_conf *pmu);
int htp_iface_etm(remote_handle64 handle, unsigned int enable);
int htp_iface_hwinfo(remote_handle64 handle, unsigned int *n_threads, unsigned int *n_hvx, unsigned int *n_hmx,
		     unsigned long long *vtcm_bytes);

#ifdef __cplusplus
}
#endif

#endif
