extern "C" int emu_placeholder() { return 0; }
