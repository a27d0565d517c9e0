// NVRTC has no C library; it knows the functions of math.h by themselves.
#pragma once
