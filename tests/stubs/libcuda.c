// A libcuda that records. NVIDIA's own header declares what is defined here, so a wrong signature does not compile.
#include <cuda.h>

#include "recorder.h"

_Static_assert(CU_STREAM_CAPTURE_MODE_RELAXED == RELAXED, "capture mode");
_Static_assert(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED == UNSUPPORTED_IN_CAPTURE, "capture error");
_Static_assert(CUDA_ERROR_INVALID_CONTEXT == NO_CONTEXT, "context error");
_Static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8, "function attribute");
_Static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6, "launch attribute");
_Static_assert(sizeof(CUlaunchConfig) == 56 && sizeof(CUlaunchAttribute) == 72, "launch structs");

static _Thread_local CUcontext current, previous;
static int driver_version = 13000;

void stub_driver_version(int version) { driver_version = version; }

CUresult cuDriverGetVersion(int *version) {
  *version = driver_version;
  return record("cuDriverGetVersion", "");
}

CUresult cuInit(unsigned int flags) { return record("cuInit", "%u", flags); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = 100 + ordinal;
  return record("cuDeviceGet", "%d", ordinal);
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(0x7f0000001000ull + device);
  return record("cuDevicePrimaryCtxRetain", "%d", device);
}
CUresult cuCtxPushCurrent(CUcontext context) {
  previous = current;
  current = context;
  return record("cuCtxPushCurrent", "%p", (void *)context);
}
CUresult cuCtxPopCurrent(CUcontext *context) {
  *context = current;
  current = previous;
  return record("cuCtxPopCurrent", "");
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return record("cuCtxSetCurrent", "%p", (void *)context);
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  int given = *mode, code = record("cuThreadExchangeStreamCaptureMode", "%d", given);
  if (code) return code;
  *mode = (CUstreamCaptureMode)stub_capture_mode;
  stub_capture_mode = given;
  return 0;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  const unsigned char *bytes = image;
  *module = (CUmodule)0x7f0000002000ull;
  int code = record("cuModuleLoadData", "%02x%c%c%c", bytes[0], bytes[1], bytes[2], bytes[3]);
  if (current == NULL) return NO_CONTEXT;
  return code ? code : forbidden_in_capture();
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x7f0000003000ull;
  return record("cuModuleGetFunction", "%p %s", (void *)module, name);
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return record("cuFuncSetAttribute", "%p %d %d", (void *)function, attribute, value);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
  int overlap = c->numAttrs ? c->attrs[0].id == 6 ? c->attrs[0].value.programmaticStreamSerializationAllowed : -1 : 0;
  int code = record("cuLaunchKernelEx", "%p %u,%u,%u %u,%u,%u %u %p %d %d %s", (void *)function, c->gridDimX, c->gridDimY,
                    c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, (void *)c->hStream,
                    overlap, extra != NULL, hex(params[0]));
  if (current == NULL) return NO_CONTEXT;
  return code;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == 700 ? "an illegal memory access was encountered" : error == 900 ? "not permitted while capturing" : NULL;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 900 ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : NULL;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
