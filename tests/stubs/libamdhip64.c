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
// Words of the real libraries for what the drivers' tests ask: 5.7.1, 6.4.3 and 7.2.4 agree, and every code that they do
// not know is "unknown" to them, never NULL. tools/rocm_space.py asks each library for the words of these.
#define WORDS(code, text) {code, #code, text}
static const struct words {
  int code;
  const char *name, *text;
} known[] = {
    WORDS(hipErrorNoDevice, "no ROCm-capable device is detected"),
    WORDS(hipErrorInvalidDevice, "invalid device ordinal"),
    WORDS(hipErrorInvalidContext, "invalid device context"),
    WORDS(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    WORDS(hipErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
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
