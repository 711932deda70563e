// A macro for functions that are compiled for the host and the device.
#pragma once

#ifdef __CUDACC__
#define TE_GRAPH_HOST_DEVICE __host__ __device__
#else
#define TE_GRAPH_HOST_DEVICE
#endif
