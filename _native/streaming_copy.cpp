#include "streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aiocuda {
namespace {

using Body = void (*)(char* dst, const char* src, size_t blocks);

// Each body moves blocks of 256 bytes to a destination aligned to 64.
constexpr size_t kBlock = 256;
constexpr size_t kAlignment = 64;
// Below this the head, the fence and the lost cache hits cost more than they save.
constexpr size_t kSmallest = 4096;

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void body_avx512(char* dst, const char* src, size_t blocks) {
  for (; blocks != 0; --blocks, dst += kBlock, src += kBlock) {
    const __m512i a = _mm512_loadu_si512(src);
    const __m512i b = _mm512_loadu_si512(src + 64);
    const __m512i c = _mm512_loadu_si512(src + 128);
    const __m512i d = _mm512_loadu_si512(src + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 192), d);
  }
}

__attribute__((target("avx2"))) void body_avx2(char* dst, const char* src, size_t blocks) {
  for (; blocks != 0; --blocks, dst += kBlock, src += kBlock) {
    for (size_t i = 0; i < kBlock; i += 64) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
    }
  }
}

void body_sse2(char* dst, const char* src, size_t blocks) {
  for (; blocks != 0; --blocks, dst += kBlock, src += kBlock) {
    for (size_t i = 0; i < kBlock; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    }
  }
}

void fence() { _mm_sfence(); }

#elif defined(__aarch64__)

void body_neon(char* dst, const char* src, size_t blocks) {
  for (; blocks != 0; --blocks, dst += kBlock, src += kBlock) {
    for (size_t i = 0; i < kBlock; i += 32) {
      __asm__ volatile(
          "ldp q0, q1, [%1]\n\t"
          "stnp q0, q1, [%0]\n\t"
          :
          : "r"(dst + i), "r"(src + i)
          : "v0", "v1", "memory");
    }
  }
}

void fence() { __asm__ volatile("dmb ishst" ::: "memory"); }

#endif

Body choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return body_avx512;
  if (__builtin_cpu_supports("avx2")) return body_avx2;
  return body_sse2;
#elif defined(__aarch64__)
  return body_neon;
#else
  return nullptr;
#endif
}

}  // namespace

void streaming_copy(void* dst, const void* src, size_t n) {
  static const Body body = choose();
  if (body == nullptr || n < kSmallest) {
    std::memcpy(dst, src, n);
    return;
  }
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const size_t head = (kAlignment - (reinterpret_cast<uintptr_t>(to) & (kAlignment - 1))) & (kAlignment - 1);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  n -= head;
  const size_t blocks = n / kBlock;
  body(to, from, blocks);
  std::memcpy(to + blocks * kBlock, from + blocks * kBlock, n % kBlock);
#if defined(__x86_64__) || defined(__aarch64__)
  fence();
#endif
}

}  // namespace aiocuda
