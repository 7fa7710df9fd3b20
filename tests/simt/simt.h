/*
 * What a translated kernel sees, included in front of every file: the built-in variables and functions of CUDA C++ that
 * the kernels use, kernel launches and shared memory. The threads behind them are fibers (scheduler.h).
 */
#pragma once

#include <cuda_runtime.h>
#include <math.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#define SIMT_CUDA_ARCH 900
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__

extern uint3 threadIdx, blockIdx; /* of the fiber that runs */
extern dim3 blockDim, gridDim;

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

namespace simt {

/* ---- shared memory ---- */

void *dynamic_shared(size_t alignment);
void *static_shared(const void *key, size_t bytes, size_t alignment);
uint32_t shared_address(const void *pointer); /* within the block: what a 32-bit shared address is */

/* One variable per instance of the function that declares it, as in CUDA. */
template <class T>
T &shared() {
    static const char key = 0;
    return *static_cast<T *>(static_shared(&key, sizeof(T), alignof(T)));
}

/* ---- streams ---- */

/* Does it at once, or, when the stream is being captured, with each launch of the graph. (graph.cpp) */
cudaError_t in_stream(cudaStream_t stream, std::function<cudaError_t()> work);
/* The same of what the host does to memory, from which a launch on another device keeps it meanwhile. */
cudaError_t in_stream_by_host(cudaStream_t stream, std::function<cudaError_t()> work);

/* ---- launches ---- */

struct Body { /* a kernel with its arguments */
    virtual void operator()() const = 0;
    virtual std::shared_ptr<Body> copy() const = 0;
};

struct Config {
    const char *name;
    dim3 grid, block;
    size_t shared_bytes;
    unsigned int cluster;
    const void *function;
    cudaStream_t stream;
    bool early; /* may begin before the kernel in front of it has ended */
};

cudaError_t launch(const Config &config, const Body &body);

/* Arguments are copied once, as into constant memory, and by each thread. */
template <class... Parameters, class... Arguments>
cudaError_t launch(Config config, void (*kernel)(Parameters...), Arguments &&...arguments) {
    struct Call : Body {
        void (*kernel)(Parameters...);
        std::tuple<std::decay_t<Parameters>...> arguments;
        Call(void (*kernel_)(Parameters...), Arguments &&...given)
            : kernel(kernel_), arguments(std::forward<Arguments>(given)...) {}
        void operator()() const override { std::apply(kernel, arguments); }
        std::shared_ptr<Body> copy() const override { return std::make_shared<Call>(*this); }
    };
    config.function = reinterpret_cast<const void *>(kernel);
    return launch(config, Call(kernel, std::forward<Arguments>(arguments)...));
}

/* kernel<<<grid, block, bytes, stream>>>(arguments) */
struct Launch {
    Config config;
    Launch(const char *name, dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t stream = nullptr)
        : config{name, grid, block, bytes, 1, nullptr, stream, false} {}

    template <class Kernel, class... Arguments>
    void operator()(Kernel kernel, Arguments &&...arguments) {
        launch(config, kernel, std::forward<Arguments>(arguments)...);
    }
};

Config config_of(const cudaLaunchConfig_t &launch);

template <class Kernel, class... Arguments>
cudaError_t launch_ex(const cudaLaunchConfig_t *config, Kernel kernel, Arguments &&...arguments) {
    return launch(config_of(*config), kernel, std::forward<Arguments>(arguments)...);
}
#define cudaLaunchKernelEx simt::launch_ex

/* ---- inline PTX ---- */

/* An operand of an asm statement: its bits, or where it lies. */
struct Operand {
    void *place;
    uint64_t bits;
    size_t size;
};

template <class T>
Operand input(T value) {
    Operand operand = {nullptr, 0, sizeof(T)};
    memcpy(&operand.bits, &value, sizeof(T));
    return operand;
}

template <class T>
Operand output(T &variable) {
    return {&variable, 0, sizeof(T)};
}

struct Instruction;

class Program {
public:
    explicit Program(const char *text);
    void run(std::initializer_list<Operand> outputs, std::initializer_list<Operand> inputs) const;

private:
    const Instruction *instructions_;
    size_t count_;
};

/* ---- votes and exchanges of a warp ---- */

/* Called by every lane of `mask` with its own item; the last one to come runs `combine` for all of them: items[lane] is
 * NULL for lanes that are not there. */
using Combine = void (*)(void *const *items, const void *how);
void warp_collective(uint32_t mask, Combine combine, void *item, const void *how = nullptr);

struct Exchange {
    uint64_t value, result;
    int source; /* lane */
};

inline void exchange(void *const *items, const void *) {
    for (int lane = 0; lane < 32; ++lane) {
        if (items[lane] == nullptr) continue;
        Exchange &mine = *static_cast<Exchange *>(items[lane]);
        void *from = items[mine.source];
        mine.result = from ? static_cast<Exchange *>(from)->value : ~uint64_t{0}; /* not there: anything */
    }
}

inline int lane() {
    return static_cast<int>((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}

template <class T>
T shuffle(uint32_t mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "up to 64 bits");
    Exchange item = {0, 0, source};
    memcpy(&item.value, &value, sizeof(T));
    warp_collective(mask, exchange, &item);
    memcpy(&value, &item.result, sizeof(T));
    return value;
}

struct Vote {
    uint64_t value, result;
};

/* Every lane gets `operation` over the values of all. */
template <class Operation>
uint64_t vote(uint32_t mask, uint64_t value, Operation) {
    Vote item = {value, 0};
    warp_collective(
        mask,
        [](void *const *items, const void *) {
            uint64_t result = 0;
            bool first = true;
            for (int lane = 0; lane < 32; ++lane) {
                if (items[lane] == nullptr) continue;
                const uint64_t one = static_cast<Vote *>(items[lane])->value;
                result = first ? one : Operation{}(result, one);
                first = false;
            }
            for (int lane = 0; lane < 32; ++lane)
                if (items[lane]) static_cast<Vote *>(items[lane])->result = result;
        },
        &item);
    return item.result;
}

struct Or {
    uint64_t operator()(uint64_t a, uint64_t b) const { return a | b; }
};
struct Add {
    uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
template <class T>
struct Max {
    uint64_t operator()(uint64_t a, uint64_t b) const { return static_cast<T>(a) < static_cast<T>(b) ? b : a; }
};
template <class T>
struct Min {
    uint64_t operator()(uint64_t a, uint64_t b) const { return static_cast<T>(b) < static_cast<T>(a) ? b : a; }
};

/* ---- barriers ---- */

void block_barrier();

}  // namespace simt

/* ---- the names of CUDA C++ ---- */

inline void __syncthreads() { simt::block_barrier(); }
inline void __threadfence() {} /* what a thread stores is in memory at once */
inline void __syncwarp(unsigned int mask = ~0u) { simt::vote(mask, 0, simt::Or{}); }

template <class T>
T __shfl_sync(unsigned int mask, T value, int source, int width = 32) {
    return simt::shuffle(mask, value, (simt::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int distance, int width = 32) {
    const int lane = simt::lane(), source = lane - static_cast<int>(distance);
    return simt::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane);
}
template <class T>
T __shfl_xor_sync(unsigned int mask, T value, int bits, int width = 32) {
    const int lane = simt::lane(), source = lane ^ bits;
    return simt::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane);
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
    return static_cast<unsigned int>(simt::vote(mask, uint64_t{predicate != 0} << simt::lane(), simt::Or{}));
}
inline int __any_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline unsigned int __reduce_or_sync(unsigned int mask, unsigned int x) {
    return static_cast<unsigned int>(simt::vote(mask, x, simt::Or{}));
}
template <class T>
T __reduce_add_sync(unsigned int mask, T x) {
    return static_cast<T>(simt::vote(mask, static_cast<uint64_t>(x), simt::Add{}));
}
template <class T>
T __reduce_max_sync(unsigned int mask, T x) {
    return static_cast<T>(simt::vote(mask, static_cast<uint64_t>(x), simt::Max<T>{}));
}
template <class T>
T __reduce_min_sync(unsigned int mask, T x) {
    return static_cast<T>(simt::vote(mask, static_cast<uint64_t>(x), simt::Min<T>{}));
}

inline size_t __cvta_generic_to_shared(const void *pointer) { return simt::shared_address(pointer); }

/* One fiber runs at a time, and only a wait lets the next one run. */
template <class T>
T simt_exchange(T *place, T value) {
    const T before = *place;
    *place = value;
    return before;
}
template <class T>
using simt_same = std::common_type_t<T>; /* the pointer alone decides the type */
template <class T>
T atomicAdd(T *place, simt_same<T> x) {
    return simt_exchange(place, static_cast<T>(*place + x));
}
template <class T>
T atomicOr(T *place, simt_same<T> x) {
    return simt_exchange(place, static_cast<T>(*place | x));
}
template <class T>
T atomicMin(T *place, simt_same<T> x) {
    return simt_exchange(place, x < *place ? x : *place);
}
template <class T>
T atomicMax(T *place, simt_same<T> x) {
    return simt_exchange(place, *place < x ? x : *place);
}
template <class T>
T atomicExch(T *place, simt_same<T> x) {
    return simt_exchange(place, x);
}
template <class T>
T atomicCAS(T *place, simt_same<T> expected, simt_same<T> x) {
    return simt_exchange(place, *place == expected ? x : *place);
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

template <class T>
T __ldcg(const T *address) {
    return *address;
}
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
/* Of two 16-bit numbers in a word. */
inline unsigned int __vminu2(unsigned int x, unsigned int y) {
    return std::min(x & 0xffff, y & 0xffff) | std::min(x >> 16, y >> 16) << 16;
}
/* Bytes that the digits of `selector` name: 0 to 3 of x, 4 to 7 of y. */
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned int result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<unsigned int>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned int>(x)) : 32; }
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
    return static_cast<unsigned int>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <class To, class From>
To simt_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline unsigned int __float_as_uint(float x) { return simt_bits<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return simt_bits<float>(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
