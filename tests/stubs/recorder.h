// Shared by both stub driver libraries: a log of calls, injected errors, and a switch for "a stream is captured".
// Every call is one line "thread function text"; a test reads the log, resets it, and asks for failures by name.
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LOG_BYTES = 1 << 22, RELAXED = 2, UNSUPPORTED_IN_CAPTURE = 900, NO_CONTEXT = 201 };

static pthread_mutex_t stub_mutex = PTHREAD_MUTEX_INITIALIZER;
static char stub_text[LOG_BYTES];
static size_t stub_used;
static char stub_failing[64];
static int stub_failing_code, stub_failing_times, stub_capturing, stub_params_bytes, stub_threads;
static _Thread_local int stub_thread, stub_capture_mode;

// Logs one call; returns the error the test asked for, or 0.
static int record(const char *function, const char *format, ...) {
  va_list arguments;
  int code = 0;
  pthread_mutex_lock(&stub_mutex);
  if (stub_thread == 0) stub_thread = ++stub_threads;
  stub_used += snprintf(stub_text + stub_used, LOG_BYTES - stub_used, "%d %s ", stub_thread, function);
  va_start(arguments, format);
  stub_used += vsnprintf(stub_text + stub_used, LOG_BYTES - stub_used, format, arguments);
  va_end(arguments);
  stub_used += snprintf(stub_text + stub_used, LOG_BYTES - stub_used, "\n");
  if (stub_failing_times > 0 && strcmp(function, stub_failing) == 0) {
    stub_failing_times--;
    code = stub_failing_code;
  }
  pthread_mutex_unlock(&stub_mutex);
  return code;
}

static int forbidden_in_capture(void) {
  return stub_capturing && stub_capture_mode != RELAXED ? UNSUPPORTED_IN_CAPTURE : 0;
}

static const char *hex(const void *data) {
  static _Thread_local char text[8193];
  for (int i = 0; i < stub_params_bytes && i < 4096; i++)
    snprintf(text + 2 * i, 3, "%02x", ((const unsigned char *)data)[i]);
  return text;
}

const char *stub_log(void) { return stub_text; }
void stub_reset(int params_bytes) {
  pthread_mutex_lock(&stub_mutex);
  stub_used = 0;
  stub_text[0] = 0;
  stub_failing_times = stub_capturing = stub_capture_mode = 0;
  stub_params_bytes = params_bytes;
  pthread_mutex_unlock(&stub_mutex);
}
void stub_fail(const char *function, int code, int times) {
  snprintf(stub_failing, sizeof stub_failing, "%s", function);
  stub_failing_code = code;
  stub_failing_times = times;
}
void stub_capture(int on) { stub_capturing = on; }
