// Moving bytes without giving memory to pages that hold nothing but zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu {

void watch_device_file(int file, std::uintptr_t alias, std::size_t size);
void move_bytes(std::byte* destination, const std::byte* source, std::size_t nbytes);
// Marks what is about to be overwritten, so that whoever reads it too early notices.
void poison(std::byte* destination, std::size_t nbytes);
// The device's pages go back to the system.
void forget_bytes(std::byte* memory, std::size_t nbytes);

}  // namespace emu
