// NVRTC has no C library; size_t is built in.
#pragma once
