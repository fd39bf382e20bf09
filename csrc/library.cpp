// What the library says of itself: its version, checked against the Python package's by
// cputrain.native.
#include "visibility.h"

CPUTRAIN_EXPORT const char* cputrain_version() { return CPUTRAIN_VERSION; }
