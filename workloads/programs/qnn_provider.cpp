// Stands in for ONNX Runtime's QNN provider: functions of its stages' names, which do a little work and may throw, as its own do.
// With -DTAIL, ComposeGraph ends in another function. drive_stages prints what each call did as JSON.
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <string>
#include <unistd.h>

static long now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

__attribute__((noinline)) static int work(int n)
{
    usleep(500);
    if (n % 3 == 0)
        throw std::runtime_error("a failure of the runtime");
    return n;
}

namespace onnxruntime::qnn {
struct QnnBackendManager {
    int ReadContextBinIfValid(int n), LoadCachedQnnContextFromBuffer(int n), CreateContext(int n), GetContextBinaryBuffer(int n);
    int ExtractBackendProfilingInfo(int n);
};
struct QnnModel {
    int ComposeGraph(int n), FinalizeGraphs(int n), ExecuteGraph(int n);
};

// What it holds is released also when an exception passes, by a part that the compiler moves away. No two have the same code.
#define STAGE(name)                                                                                                    \
    int name(int n)                                                                                                    \
    {                                                                                                                  \
        std::string held(n + __LINE__, 'x');                                                                           \
        int done = work(n);                                                                                            \
        if (n % 3 == 1)                                                                                                \
            return done + (int)held.size();                                                                            \
        held += std::to_string(done);                                                                                  \
        return (int)held.size();                                                                                       \
    }
STAGE(QnnBackendManager::ReadContextBinIfValid)
STAGE(QnnBackendManager::LoadCachedQnnContextFromBuffer)
STAGE(QnnBackendManager::CreateContext)
STAGE(QnnBackendManager::GetContextBinaryBuffer)
STAGE(QnnBackendManager::ExtractBackendProfilingInfo)
STAGE(QnnModel::FinalizeGraphs)
STAGE(QnnModel::ExecuteGraph)
#ifdef TAIL
int QnnModel::ComposeGraph(int n) { return work(n); }
#else
STAGE(QnnModel::ComposeGraph)
#endif
}

using namespace onnxruntime::qnn;

template <typename Owner> static void logged(const char *stage, int (Owner::*call)(int), int n)
{
    Owner owner;
    bool threw = false;
    long begin = now();
    try {
        (owner.*call)(n);
    } catch (const std::exception &) {
        threw = true;
    }
    printf("[\"%s\", %ld, %ld, %s]\n", stage, begin, now(), threw ? "true" : "false");
}

extern "C" void drive_stages(int rounds)
{
    for (int n = 0; n < rounds; n++) {
        logged("context read", &QnnBackendManager::ReadContextBinIfValid, n);
        logged("context load", &QnnBackendManager::LoadCachedQnnContextFromBuffer, n);
        logged("context create", &QnnBackendManager::CreateContext, n);
        logged("context serialize", &QnnBackendManager::GetContextBinaryBuffer, n);
        logged("harvest", &QnnBackendManager::ExtractBackendProfilingInfo, n);
        logged("compose", &QnnModel::ComposeGraph, n);
        logged("finalize", &QnnModel::FinalizeGraphs, n);
        logged("execute", &QnnModel::ExecuteGraph, n);
    }
    fflush(stdout);
}
