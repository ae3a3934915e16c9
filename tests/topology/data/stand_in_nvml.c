/* Stands in for the driver's libnvidia-ml.so.1. nvmlInit reads the machine from the file that STAND_IN_NVML names:
 *
 *   init CODE                            what nvmlInit returns
 *   gpu ADDRESS CODE                     the next GPU, and what the search for its handle returns
 *   link GPU LINK UP CODE KIND ADDRESS   an NVLink, whether it is up, and its far end: CODE is what the question for
 *                                        its KIND returns
 *   level GPU GPU CODE LEVEL             the common ancestor of two GPUs, either way
 *
 * ADDRESS is domain:bus:device, in hexadecimal. What the file does not name is NVML_ERROR_NOT_SUPPORTED. Like the
 * driver's library, this one counts how often it was opened and closed. Struct layouts are those of the Python binding.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_FILE = 999 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;

typedef struct {
    unsigned domain, bus, device;
} Address;

static int num_opened, init_code, num_gpus, num_links, num_levels;
static struct { Address address; int code; } gpus[16];
static struct { int gpu, code; unsigned link, up, kind; Address end; } links[512];
static struct { int one, other, code; unsigned level; } levels[256];

static int gpu_of(void *handle) { return (int)(intptr_t)handle - 1; }

static int fill(Pci *pci, Address address) {
    memset(pci, 0, sizeof *pci);
    pci->domain = address.domain;
    pci->bus = address.bus;
    pci->device = address.device;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", address.domain, address.bus, address.device);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    char line[256];
    FILE *file = fopen(getenv("STAND_IN_NVML"), "r");
    (void)flags;
    if (!file) return NO_FILE;
    init_code = num_gpus = num_links = num_levels = 0;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "init %d", &init_code);
        if (sscanf(line, "gpu %x:%x:%x %d", &gpus[num_gpus].address.domain, &gpus[num_gpus].address.bus,
                   &gpus[num_gpus].address.device, &gpus[num_gpus].code) == 4)
            num_gpus++;
        if (sscanf(line, "link %d %u %u %d %u %x:%x:%x", &links[num_links].gpu, &links[num_links].link,
                   &links[num_links].up, &links[num_links].code, &links[num_links].kind, &links[num_links].end.domain,
                   &links[num_links].end.bus, &links[num_links].end.device) == 8)
            num_links++;
        if (sscanf(line, "level %d %d %d %u", &levels[num_levels].one, &levels[num_levels].other,
                   &levels[num_levels].code, &levels[num_levels].level) == 4)
            num_levels++;
    }
    fclose(file);
    num_opened += !init_code;
    return init_code;
}

int nvmlShutdown(void) {
    num_opened--;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = num_gpus;
    return num_opened > 0 ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= num_gpus) return INVALID_ARGUMENT;
    *handle = (void *)(intptr_t)(index + 1);
    return gpus[index].code;
}

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) { return fill(pci, gpus[gpu_of(handle)].address); }

static int find_link(void *handle, unsigned link) {
    for (int i = 0; i < num_links; i++)
        if (links[i].gpu == gpu_of(handle) && links[i].link == link) return i;
    return -1;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *up) {
    int found = find_link(handle, link);
    if (found < 0) return NOT_SUPPORTED;
    *up = links[found].up;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, unsigned *kind) {
    int found = find_link(handle, link);
    if (found < 0) return NOT_SUPPORTED;
    *kind = links[found].kind;
    return links[found].code;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, Pci *pci) {
    int found = find_link(handle, link);
    return found < 0 ? NOT_SUPPORTED : fill(pci, links[found].end);
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *level) {
    int a = gpu_of(one), b = gpu_of(other);
    for (int i = 0; i < num_levels; i++)
        if ((levels[i].one == a && levels[i].other == b) || (levels[i].one == b && levels[i].other == a)) {
            *level = levels[i].level;
            return levels[i].code;
        }
    return NOT_SUPPORTED;
}
