/* libcuda.so.1 for the loader: libraries that are linked with it can be opened. It starts, as the checks before a run
   ask (prepare.machine_check), and every other call says "no device". */
#define NO_DEVICE(name) int name(void) { return 100; }
NO_DEVICE(cuGetErrorString) NO_DEVICE(cuGetErrorName) NO_DEVICE(cuGetProcAddress) NO_DEVICE(cuGetProcAddress_v2)
NO_DEVICE(cuDeviceGet) NO_DEVICE(cuDeviceGetAttribute) NO_DEVICE(cuDeviceGetCount) NO_DEVICE(cuDeviceGetUuid_v2)
NO_DEVICE(cuCtxGetCurrent) NO_DEVICE(cuCtxSetCurrent) NO_DEVICE(cuCtxGetDevice) NO_DEVICE(cuDevicePrimaryCtxRetain) NO_DEVICE(cuDevicePrimaryCtxRelease)
NO_DEVICE(cuMemCreate) NO_DEVICE(cuMemMap) NO_DEVICE(cuMemUnmap) NO_DEVICE(cuMemRelease) NO_DEVICE(cuMemAddressReserve) NO_DEVICE(cuMemAddressFree)
NO_DEVICE(cuMemSetAccess) NO_DEVICE(cuMemGetAllocationGranularity) NO_DEVICE(cuMemGetAddressRange) NO_DEVICE(cuMemGetAddressRange_v2)
NO_DEVICE(cuMemExportToShareableHandle) NO_DEVICE(cuMemImportFromShareableHandle) NO_DEVICE(cuMemRetainAllocationHandle)
NO_DEVICE(cuMemGetAllocationPropertiesFromHandle) NO_DEVICE(cuPointerGetAttribute) NO_DEVICE(cuTensorMapEncodeTiled) NO_DEVICE(cuTensorMapEncodeIm2col)
NO_DEVICE(cuModuleLoadData) NO_DEVICE(cuModuleLoadDataEx) NO_DEVICE(cuModuleUnload) NO_DEVICE(cuModuleGetFunction) NO_DEVICE(cuModuleGetGlobal_v2)
NO_DEVICE(cuLibraryLoadData) NO_DEVICE(cuLibraryUnload) NO_DEVICE(cuLibraryGetKernel) NO_DEVICE(cuKernelGetFunction)
NO_DEVICE(cuLinkCreate) NO_DEVICE(cuLinkCreate_v2) NO_DEVICE(cuLinkAddData) NO_DEVICE(cuLinkAddData_v2) NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkDestroy)
NO_DEVICE(cuLaunchKernel) NO_DEVICE(cuLaunchKernelEx) NO_DEVICE(cuLaunchCooperativeKernel) NO_DEVICE(cuFuncSetAttribute) NO_DEVICE(cuFuncSetCacheConfig)
NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor) NO_DEVICE(cuStreamWriteValue32_v2) NO_DEVICE(cuStreamGetCaptureInfo_v2)
NO_DEVICE(cuMulticastCreate) NO_DEVICE(cuMulticastAddDevice) NO_DEVICE(cuMulticastBindMem)
/* torch asks for this one when it chooses a device. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
