// NVRTC has no C library: its functions are built in, its constants are not.
#pragma once
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
