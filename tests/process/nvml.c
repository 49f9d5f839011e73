/* A stand-in for NVIDIA's driver library (NVML) on a machine without GPUs: KVD_TEST_DEVICES of them,
   with 1 GiB each. */
#include <stdlib.h>

static long count(void) {
    const char *text = getenv("KVD_TEST_DEVICES");
    return text ? atol(text) : 0;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned int *found) {
    *found = (unsigned int)count();
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(unsigned long)(index + 1);
    return index < count() ? 0 : 2;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    (void)device;
    memory[0] = memory[1] = 1ull << 30;
    memory[2] = 0;
    return 0;
}
