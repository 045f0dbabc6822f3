// A libamdhip64 that records. AMD's own header declares what is defined here, so a wrong signature does not compile.
#include <hip/hip_runtime_api.h>

#include "recorder.h"

_Static_assert(hipStreamCaptureModeRelaxed == RELAXED, "capture mode");
_Static_assert(hipErrorStreamCaptureUnsupported == UNSUPPORTED_IN_CAPTURE, "capture error");
_Static_assert(hipErrorStreamCaptureWrongThread == 908, "last capture error");
_Static_assert(hipErrorInvalidContext == NO_CONTEXT, "context error");
_Static_assert(sizeof(hipStreamCaptureMode) == 4 && sizeof(hipError_t) == 4, "enums are ints");
_Static_assert(sizeof(hipFunction_t) == 8 && sizeof(hipStream_t) == 8 && sizeof(hipModule_t) == 8, "handles");

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode *mode) {
  int given = *mode, code = record("hipThreadExchangeStreamCaptureMode", "%d", given);
  if (code) return code;
  *mode = (hipStreamCaptureMode)stub_capture_mode;
  stub_capture_mode = given;
  return 0;
}
hipError_t hipModuleLoadData(hipModule_t *module, const void *image) {
  const unsigned char *bytes = image;
  *module = (hipModule_t)0x7f0000002000ull;
  int code = record("hipModuleLoadData", "%02x%c%c%c", bytes[0], bytes[1], bytes[2], bytes[3]);
  return code ? code : forbidden_in_capture();
}
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
  *function = (hipFunction_t)0x7f0000003000ull;
  return record("hipModuleGetFunction", "%p %s", (void *)module, name);
}
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned int gx, unsigned int gy, unsigned int gz,
                                 unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                                 hipStream_t stream, void **params, void **extra) {
  return record("hipModuleLaunchKernel", "%p %u,%u,%u %u,%u,%u %u %p %d %d %s", (void *)function, gx, gy, gz, bx, by,
                bz, shared, (void *)stream, 0, extra != NULL, hex(params[0]));
}
// The words of the real libraries: 5.7.1, 6.4.3 and 7.2.4 agree but for two of 7. Every other code is "unknown" to
// them, never NULL. tools/rocm_space.py asks each library for the words of every code.
#define WORDS(code, text) {code, #code, text}
static const struct words {
  int code;
  const char *name, *text;
} known[] = {
    WORDS(hipSuccess, "no error"),
    WORDS(hipErrorInvalidValue, "invalid argument"),
    WORDS(hipErrorOutOfMemory, "out of memory"),
    WORDS(hipErrorNotInitialized, "initialization error"),
    WORDS(hipErrorDeinitialized, "driver shutting down"),
    WORDS(hipErrorProfilerDisabled, "profiler disabled while using external profiling tool"),
    WORDS(hipErrorProfilerNotInitialized, "profiler is not initialized"),
    WORDS(hipErrorProfilerAlreadyStarted, "profiler already started"),
    WORDS(hipErrorProfilerAlreadyStopped, "profiler already stopped"),
    WORDS(hipErrorInvalidConfiguration, "invalid configuration argument"),
    WORDS(hipErrorInvalidPitchValue, "invalid pitch argument"),
    WORDS(hipErrorInvalidSymbol, "invalid device symbol"),
    WORDS(hipErrorInvalidDevicePointer, "invalid device pointer"),
    WORDS(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    WORDS(hipErrorInsufficientDriver, "driver version is insufficient for runtime version"),
    WORDS(hipErrorMissingConfiguration, "__global__ function call is not configured"),
    WORDS(hipErrorPriorLaunchFailure, "unspecified launch failure in prior launch"),
    WORDS(hipErrorInvalidDeviceFunction, "invalid device function"),
    WORDS(hipErrorNoDevice, "no ROCm-capable device is detected"),
    WORDS(hipErrorInvalidDevice, "invalid device ordinal"),
    WORDS(hipErrorInvalidImage, "device kernel image is invalid"),
    WORDS(hipErrorInvalidContext, "invalid device context"),
    WORDS(hipErrorContextAlreadyCurrent, "context is already current context"),
    WORDS(hipErrorMapFailed, "mapping of buffer object failed"),
    WORDS(hipErrorUnmapFailed, "unmapping of buffer object failed"),
    WORDS(hipErrorArrayIsMapped, "array is mapped"),
    WORDS(hipErrorAlreadyMapped, "resource already mapped"),
    WORDS(hipErrorNoBinaryForGpu, "no kernel image is available for execution on the device"),
    WORDS(hipErrorAlreadyAcquired, "resource already acquired"),
    WORDS(hipErrorNotMapped, "resource not mapped"),
    WORDS(hipErrorNotMappedAsArray, "resource not mapped as array"),
    WORDS(hipErrorNotMappedAsPointer, "resource not mapped as pointer"),
    WORDS(hipErrorECCNotCorrectable, "uncorrectable ECC error encountered"),
    WORDS(hipErrorUnsupportedLimit, "limit is not supported on this architecture"),
    WORDS(hipErrorContextAlreadyInUse, "exclusive-thread device already in use by a different thread"),
    WORDS(hipErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    WORDS(hipErrorInvalidKernelFile, "invalid kernel file"),
    WORDS(hipErrorInvalidGraphicsContext, "invalid OpenGL or DirectX context"),
    WORDS(hipErrorInvalidSource, "device kernel image is invalid"),
    WORDS(hipErrorFileNotFound, "file not found"),
    WORDS(hipErrorSharedObjectSymbolNotFound, "shared object symbol not found"),
    WORDS(hipErrorSharedObjectInitFailed, "shared object initialization failed"),
    WORDS(hipErrorOperatingSystem, "OS call failed or operation not supported on this OS"),
    WORDS(hipErrorInvalidHandle, "invalid resource handle"),
    WORDS(hipErrorIllegalState, "the operation cannot be performed in the present state"),
    WORDS(hipErrorNotFound, "named symbol not found"),
    WORDS(hipErrorNotReady, "device not ready"),
    WORDS(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    WORDS(hipErrorLaunchOutOfResources, "too many resources requested for launch"),
    WORDS(hipErrorLaunchTimeOut, "the launch timed out and was terminated"),
    WORDS(hipErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    WORDS(hipErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    WORDS(hipErrorSetOnActiveProcess, "cannot set while device is active in this process"),
    WORDS(hipErrorContextIsDestroyed, "context is destroyed"),
    WORDS(hipErrorAssert, "device-side assert triggered"),
    WORDS(hipErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    WORDS(hipErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    WORDS(hipErrorLaunchFailure, "unspecified launch failure"),
    WORDS(hipErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    WORDS(hipErrorNotSupported, "operation not supported"),
    WORDS(hipErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    WORDS(hipErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    WORDS(hipErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    WORDS(hipErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    WORDS(hipErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    WORDS(hipErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    WORDS(hipErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    WORDS(hipErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    WORDS(hipErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"),
    WORDS(hipErrorGraphExecUpdateFailure,
          "the graph update was not performed because it included changes which"
          " violated constraints specific to instantiated graph update"),
#if HIP_VERSION_MAJOR >= 7
    WORDS(hipErrorInvalidChannelDescriptor, "invalid resource description of texture passed to the api"),
    WORDS(hipErrorInvalidTexture, "invalid texture object passed to the api"),
#endif
    WORDS(hipErrorRuntimeMemory, "runtime memory call returned error"),
    WORDS(hipErrorRuntimeOther, "runtime call other than memory returned error"),
    WORDS(hipErrorTbd, "unknown error"),
    WORDS(hipErrorUnknown, "unknown error"),
};
static const struct words *words_of(int code) {
  enum { COUNT = sizeof known / sizeof *known };
  for (int i = 0; i < COUNT; i++)
    if (known[i].code == code) return known + i;
  return known + COUNT - 1;
}
const char *hipGetErrorString(hipError_t error) { return words_of(error)->text; }
const char *hipGetErrorName(hipError_t error) { return words_of(error)->name; }
