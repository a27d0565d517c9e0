// NVRTC has no C library; the functions of math.h are built in.
#pragma once
