/* A libdcgm.so for tests. The layouts follow DCGM's public headers (dcgm_structs.h, dcgm_agent.h), so that what
 * ctypes passes is read as the real library would read it. Two GPUs; the second is split into two MIG instances. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define OK 0
#define BADPARAM (-1)
#define UNINITIALIZED (-10)
#define VER_MISMATCH (-12)
#define NO_DATA (-14)
#define CONNECTION_NOT_VALID (-21)
#define MAKE_VERSION(type, number) (unsigned int)(sizeof(type) | ((unsigned long)(number) << 24U))

typedef struct { unsigned int version, persistAfterDisconnect, timeoutMs, addressIsUnixSocket; } ConnectParams;
typedef struct { unsigned int entityGroupId, entityId; } Pair;
typedef struct {
    char gpuUuid[128];
    unsigned int nvmlGpuIndex, nvmlInstanceId, nvmlComputeInstanceId, nvmlMigProfileId, nvmlProfileSlices;
} MigInfo;
typedef struct { Pair entity, parent; MigInfo info; } MigEntry;
typedef struct { unsigned int version, count; MigEntry entityList[32 * 14]; } MigHierarchy;
typedef struct {
    unsigned int version, entityGroupId, entityId;
    unsigned short fieldId, fieldType;
    int status;
    unsigned int unused;
    int64_t ts;
    union { int64_t i64; double dbl; char str[256]; char blob[4096]; } value;
} FieldValue;

static int initialised, connect_code, watch_code, groups, watched;
static Pair members[64];
static int member_count;
static unsigned short watched_fields[16];
static int field_count;

void fake_connect_code(int code) { connect_code = code; }
void fake_watch_code(int code) { watch_code = code; }
int fake_groups(void) { return groups; }
int fake_initialised(void) { return initialised; }

int dcgmInit(void) { initialised = 1; return OK; }
int dcgmShutdown(void) { initialised = 0; return OK; }

int dcgmConnect_v2(const char *address, ConnectParams *params, uintptr_t *handle)
{
    if (!initialised) return UNINITIALIZED;
    if (params->version != MAKE_VERSION(ConnectParams, 2)) return VER_MISMATCH;
    if (strcmp(address, "127.0.0.1") || !params->timeoutMs || params->persistAfterDisconnect) return BADPARAM;
    if (params->addressIsUnixSocket) return BADPARAM;
    if (connect_code) return connect_code;
    *handle = 0x7fffffff12345678UL; /* a handle may be wider than an int */
    return OK;
}

static int valid(uintptr_t handle) { return handle == 0x7fffffff12345678UL; }

int dcgmDisconnect(uintptr_t handle)
{
    if (!valid(handle)) return BADPARAM;
    groups = watched = member_count = 0;
    return OK;
}

int dcgmGetAllSupportedDevices(uintptr_t handle, unsigned int ids[32], int *count)
{
    if (!valid(handle)) return CONNECTION_NOT_VALID;
    ids[0] = 0;
    ids[1] = 5;
    *count = 2;
    return OK;
}

int dcgmGetGpuInstanceHierarchy(uintptr_t handle, MigHierarchy *hierarchy)
{
    if (!valid(handle)) return CONNECTION_NOT_VALID;
    if (hierarchy->version != MAKE_VERSION(MigHierarchy, 2)) return VER_MISMATCH;
    for (unsigned int place = 0; place < 4; place++) {
        MigEntry *entry = &hierarchy->entityList[place];
        entry->entity.entityGroupId = place % 2 ? 5 : 4; /* compute instances are listed as well */
        entry->entity.entityId = 40 + place;
        entry->parent.entityGroupId = 1;
        entry->parent.entityId = 5;
        strcpy(entry->info.gpuUuid, "GPU-b");
        entry->info.nvmlGpuIndex = 1;
        entry->info.nvmlInstanceId = 3 + place;
    }
    hierarchy->count = 4;
    return OK;
}

int dcgmGroupCreate(uintptr_t handle, int type, const char *name, uintptr_t *group)
{
    if (!valid(handle)) return CONNECTION_NOT_VALID;
    if (type != 1 || !name || strncmp(name, "carma-", 6)) return BADPARAM;
    groups++;
    *group = 0x100000002UL;
    return OK;
}

int dcgmGroupDestroy(uintptr_t handle, uintptr_t group)
{
    if (!valid(handle) || group != 0x100000002UL) return BADPARAM;
    groups--;
    return OK;
}

int dcgmGroupAddEntity(uintptr_t handle, uintptr_t group, unsigned int entity_group, unsigned int entity)
{
    if (!valid(handle) || group != 0x100000002UL) return BADPARAM;
    members[member_count].entityGroupId = entity_group;
    members[member_count++].entityId = entity;
    return OK;
}

int dcgmFieldGroupCreate(uintptr_t handle, int count, unsigned short *fields, const char *name, uintptr_t *group)
{
    if (!valid(handle) || !name || count != 5) return BADPARAM;
    memcpy(watched_fields, fields, count * sizeof(*fields));
    field_count = count;
    *group = 0x300000004UL;
    return OK;
}

int dcgmFieldGroupDestroy(uintptr_t handle, uintptr_t group) { return valid(handle) && group == 0x300000004UL ? OK : BADPARAM; }

int dcgmWatchFields(uintptr_t handle, uintptr_t group, uintptr_t fields, long long every_us, double keep_s, int keep)
{
    if (!valid(handle) || group != 0x100000002UL || fields != 0x300000004UL) return BADPARAM;
    if (every_us != 1000000 || keep_s != 10.0 || keep != 0) return BADPARAM;
    if (watch_code) return watch_code;
    watched = 1;
    return OK;
}

static int is_watched(Pair entity, unsigned short field)
{
    int member = 0, known = 0;
    for (int place = 0; place < member_count; place++)
        member |= members[place].entityGroupId == entity.entityGroupId && members[place].entityId == entity.entityId;
    for (int place = 0; place < field_count; place++) known |= watched_fields[place] == field;
    return watched && member && known;
}

int dcgmEntitiesGetLatestValues(uintptr_t handle, Pair *entities, unsigned int entity_count, unsigned short *fields,
                                unsigned int field_total, unsigned int flags, FieldValue *values)
{
    if (!valid(handle)) return CONNECTION_NOT_VALID;
    for (unsigned int one = 0; one < entity_count; one++)
        for (unsigned int two = 0; two < field_total; two++, values++) {
            if (values->version != MAKE_VERSION(FieldValue, 2)) return VER_MISMATCH;
            values->entityGroupId = entities[one].entityGroupId;
            values->entityId = entities[one].entityId;
            values->fieldId = fields[two];
            values->status = OK;
            values->ts = (int64_t)time(NULL) * 1000000;
            if (fields[two] == 54) {
                if (flags != 1) return BADPARAM;
                values->fieldType = 's';
                snprintf(values->value.str, 256, "GPU-%c", entities[one].entityId ? 'b' : 'a');
            } else if (!is_watched(entities[one], fields[two])) {
                values->fieldType = 'd';
                values->status = NO_DATA;
            } else {
                values->fieldType = 'd'; /* 0.<field's last digit>, and a hundredth of the entity on top */
                values->value.dbl = (fields[two] - 1000) / 10.0 + entities[one].entityId / 1000.0;
            }
        }
    return OK;
}
