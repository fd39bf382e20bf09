// What the library says of itself: its version, checked against the Python package's by
// cputrain.native.
#define CPUTRAIN_EXPORT extern "C" __attribute__((visibility("default")))

CPUTRAIN_EXPORT const char* cputrain_version() { return CPUTRAIN_VERSION; }
