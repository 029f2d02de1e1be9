#include "driver_abi.h"

#include <cstring>

namespace aiocuda::abi {

Driver driver;

bool bind(const char* name, void* address) {
#define AIOCUDA_BIND(driver_name, member, parameters)                        \
  if (std::strcmp(name, #driver_name) == 0) {                                \
    driver.member = reinterpret_cast<decltype(driver.member)>(address);      \
    return true;                                                             \
  }
  AIOCUDA_ENTRY_POINTS(AIOCUDA_BIND)
#undef AIOCUDA_BIND
  return false;
}

}  // namespace aiocuda::abi
