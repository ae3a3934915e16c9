/* Stands in for the driver's libnvidia-ml.so.1. Each nvmlInit reads the machine from the file that STAND_IN_NVML names:
 *
 *   init CODE                                          what nvmlInit returns
 *   gpu UUID CODE                                      the next GPU, and what the search for its handle returns
 *   link GPU LINK CODE UP                              the state of a link
 *   field GPU FIELD SCOPE CODE TYPE TIMESTAMP VALUE    a field value; SCOPE -1 is all links
 *
 * What the file does not name is NVML_ERROR_NOT_SUPPORTED. An nvmlInit is refused unless an nvmlShutdown followed the
 * last one. Struct layouts are those of the Python binding.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, IN_USE = 19, NO_FILE = 999 };
enum { UNSIGNED_INT = 1 };

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    uint32_t type, code;
    union {
        unsigned ui;
        unsigned long long ull;
        unsigned char bytes[8];
    } value;
} Field;

static int is_open, init_code, num_gpus, num_links, num_fields;
static struct { char uuid[80]; int code; } gpus[16];
static struct { int gpu, code; unsigned link, up; } links[512];
static struct {
    int gpu, code;
    unsigned field, type;
    long long scope, timestamp;
    unsigned long long value;
} fields[2048];

static int gpu_of(void *handle) { return (int)(intptr_t)handle - 1; }

int nvmlInitWithFlags(unsigned flags) {
    char line[256];
    FILE *file = fopen(getenv("STAND_IN_NVML"), "r");
    (void)flags;
    if (!file) return NO_FILE;
    if (is_open) return IN_USE;
    init_code = num_gpus = num_links = num_fields = 0;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "init %d", &init_code);
        if (sscanf(line, "gpu %79s %d", gpus[num_gpus].uuid, &gpus[num_gpus].code) == 2) num_gpus++;
        if (sscanf(line, "link %d %u %d %u", &links[num_links].gpu, &links[num_links].link, &links[num_links].code,
                   &links[num_links].up) == 4)
            num_links++;
        if (sscanf(line, "field %d %u %lld %d %u %lld %llu", &fields[num_fields].gpu, &fields[num_fields].field,
                   &fields[num_fields].scope, &fields[num_fields].code, &fields[num_fields].type,
                   &fields[num_fields].timestamp, &fields[num_fields].value) == 7)
            num_fields++;
    }
    fclose(file);
    is_open = !init_code;
    return init_code;
}

int nvmlShutdown(void) {
    is_open = 0;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = num_gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= num_gpus) return INVALID_ARGUMENT;
    *handle = (void *)(intptr_t)(index + 1);
    return gpus[index].code;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    snprintf(uuid, length, "%s", gpus[gpu_of(handle)].uuid);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *up) {
    for (int i = 0; i < num_links; i++)
        if (links[i].gpu == gpu_of(handle) && links[i].link == link) {
            *up = links[i].up;
            return links[i].code;
        }
    return NOT_SUPPORTED;
}

static void answer(int gpu, Field *asked) {
    /* What lies outside the member that is written below is undefined. */
    memset(asked->value.bytes, 0xAA, sizeof asked->value.bytes);
    asked->code = NOT_SUPPORTED;
    for (int i = 0; i < num_fields; i++)
        if (fields[i].gpu == gpu && fields[i].field == asked->field && (uint32_t)fields[i].scope == asked->scope) {
            asked->code = fields[i].code;
            asked->type = fields[i].type;
            asked->timestamp = fields[i].timestamp;
            if (fields[i].type == UNSIGNED_INT)
                asked->value.ui = (unsigned)fields[i].value;
            else
                asked->value.ull = fields[i].value;
        }
}

int nvmlDeviceGetFieldValues(void *handle, int count, Field *asked) {
    for (int i = 0; i < count; i++) answer(gpu_of(handle), &asked[i]);
    return SUCCESS;
}
