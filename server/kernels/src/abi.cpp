// What lets the Python side check that it speaks of the same library and the same structures.
#include <cstring>

#include "kernels.h"

int64_t kernels_sizeof(const char* structure) {
    const struct {
        const char* name;
        int64_t nbytes;
    } known[] = {
        {"StoredTensor", sizeof(StoredTensor)}, {"StoredPart", sizeof(StoredPart)},
        {"StoredMatrix", sizeof(StoredMatrix)},
        {"Matrix", sizeof(Matrix)},         {"GroupedMatrix", sizeof(GroupedMatrix)},
        {"Pool", sizeof(Pool)},             {"RopeTable", sizeof(RopeTable)},
        {"Compressor", sizeof(Compressor)}, {"HyperConnection", sizeof(HyperConnection)},
        {"Attention", sizeof(Attention)},   {"Experts", sizeof(Experts)},
        {"Layer", sizeof(Layer)},           {"Draft", sizeof(Draft)},
        {"Network", sizeof(Network)},       {"Step", sizeof(Step)},
    };
    for (const auto& one : known)
        if (!std::strcmp(structure, one.name)) return one.nbytes;
    return -1;
}
