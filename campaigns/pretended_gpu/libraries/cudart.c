/* Loaded before libcudart (LD_PRELOAD), for FakeTensorMode with the CUDA build of torch: its guards choose a device, and
   ask for streams and events. Nothing can be allocated or launched. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NO_DEVICE = 100, INVALID_DEVICE = 101 };
static __thread int chosen = 0;

static int card_count(void) {
  const char *text = getenv("FAKE_GPUS");
  int count = text && *text;
  for (; text && *text; text++) count += *text == ',';
  return count;
}
static size_t card_bytes(void) { /* of the first: NAME:GiB:MAJOR.MINOR */
  const char *text = getenv("FAKE_GPUS"), *colon = text ? strchr(text, ':') : 0;
  return colon ? (size_t)(atof(colon + 1) * (1 << 30)) : 0;
}

int cudaGetDeviceCount(int *count) { *count = card_count(); return *count ? SUCCESS : NO_DEVICE; }
int cudaGetDevice(int *device) { *device = chosen; return SUCCESS; }
int cudaSetDevice(int device) { if (device >= card_count()) return INVALID_DEVICE; chosen = device; return SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaMemGetInfo(size_t *free, size_t *total) { *total = card_bytes(); *free = *total - (400UL << 20); return SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 1; return SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
int cudaStreamSynchronize(void *stream) { return SUCCESS; }
int cudaStreamQuery(void *stream) { return SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
int cudaStreamGetCaptureInfo_v3(void *stream, int *status) { *status = 0; return SUCCESS; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { static long next = 1; *stream = (void *)next++; return SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)1; return SUCCESS; }
int cudaEventRecord(void *event, void *stream) { return SUCCESS; }
int cudaEventQuery(void *event) { return SUCCESS; }
int cudaEventSynchronize(void *event) { return SUCCESS; }
int cudaEventDestroy(void *event) { return SUCCESS; }
