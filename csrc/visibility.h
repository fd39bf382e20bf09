// What the library shows: all else is hidden (-fvisibility=hidden).
#pragma once

#define CPUTRAIN_EXPORT extern "C" __attribute__((visibility("default")))
