// NVRTC has no C library; it knows size_t by itself.
#pragma once
