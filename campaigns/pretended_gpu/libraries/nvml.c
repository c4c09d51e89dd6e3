/* libnvidia-ml.so.1 that answers for the cards of FAKE_GPUS ("NAME:GiB:MAJOR.MINOR,..."): what pynvml, vLLM's platform,
   torch's count of devices (PYTORCH_NVML_BASED_CUDA_CHECK=1) and the placement ask. 400 MiB of each card are taken. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };
typedef struct { char name[96]; double gib; int major, minor; } Card;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

static Card cards[64];
static int known = -1;

static int card_count(void) {
  const char *text = getenv("FAKE_GPUS");
  char copy[8192], *rest = copy, *one;
  if (known >= 0) return known;
  known = 0;
  snprintf(copy, sizeof copy, "%s", text ? text : "");
  while ((one = strsep(&rest, ",")) && known < 64) {
    Card *card = cards + known;
    while (*one == ' ') one++;
    if (sscanf(one, "%95[^:]:%lf:%d.%d", card->name, &card->gib, &card->major, &card->minor) == 4) known++;
  }
  return known;
}

/* A handle is the place of a card, counted from 1, so that none is a null pointer. */
static Card *card_of(void *handle) { return cards + ((long)handle - 1); }
static unsigned long long bytes_of(void *handle) { return (unsigned long long)(card_of(handle)->gib * (1 << 30)); }
static void uuid_of(long place, char *text, unsigned size) { snprintf(text, size, "GPU-fa4e0000-0000-4000-8000-%012ld", place); }
static const unsigned long long TAKEN = 400ULL << 20;

int nvmlInit_v2(void) { return card_count() ? SUCCESS : DRIVER_NOT_LOADED; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "error of a pretended driver"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = card_count(); return SUCCESS; }
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned place, void **handle) {
  if ((int)place >= card_count()) return INVALID_ARGUMENT;
  *handle = (void *)(long)(place + 1);
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned place, void **handle) { return nvmlDeviceGetHandleByIndex_v2(place, handle); }
int nvmlDeviceGetHandleByUUID(const char *asked, void **handle) {
  for (long place = 0; place < card_count(); place++) {
    char uuid[64];
    uuid_of(place, uuid, sizeof uuid);
    if (!strcmp(uuid, asked)) { *handle = (void *)(place + 1); return SUCCESS; }
  }
  return NOT_FOUND;
}
int nvmlDeviceGetIndex(void *handle, unsigned *place) { *place = (unsigned)((long)handle - 1); return SUCCESS; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { uuid_of((long)handle - 1, text, size); return SUCCESS; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { snprintf(text, size, "%s", card_of(handle)->name); return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  *major = card_of(handle)->major;
  *minor = card_of(handle)->minor;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
  memory->total = bytes_of(handle);
  memory->used = TAKEN;
  memory->free = memory->total - TAKEN;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
  memory->total = bytes_of(handle);
  memory->reserved = 0;
  memory->used = TAKEN;
  memory->free = memory->total - TAKEN;
  return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "13.580.95.05"); return SUCCESS; }
int nvmlDeviceGetP2PStatus(void *one, void *other, int kind, int *status) { *status = 0; return SUCCESS; }
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) { *now = *later = 0; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) { rates[0] = rates[1] = 0; return SUCCESS; }
int nvmlDeviceGetPciInfo_v3(void *handle, void *information) { return NOT_SUPPORTED; }
int nvmlDeviceGetNumaNodeId(void *handle, unsigned *node) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes) { *count = 0; return SUCCESS; }
