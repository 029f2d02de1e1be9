#include "driver_abi.h"
