"""asyncio-native copies between GPU and host memory."""
