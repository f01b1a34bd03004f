// Threads that share a row and packs that each of them holds, by the packs of a row. Written by
// scripts/tune_kernels.py on one NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-23.
#pragma once

// Packs of 4 elements. SHAPE(packs up to, few rows only, threads, packs a thread, early)
#define KFC_ROW_SHAPES_4(SHAPE)     \
  SHAPE(8, false, 8, 1, true)       \
  SHAPE(32, true, 32, 1, true)      \
  SHAPE(32, false, 8, 4, true)      \
  SHAPE(64, false, 32, 2, true)     \
  SHAPE(96, true, 32, 3, true)      \
  SHAPE(96, false, 32, 3, false)    \
  SHAPE(128, false, 32, 4, true)    \
  SHAPE(192, false, 96, 2, true)    \
  SHAPE(256, true, 96, 3, true)     \
  SHAPE(256, false, 96, 3, false)   \
  SHAPE(384, false, 128, 3, true)   \
  SHAPE(512, false, 128, 4, true)   \
  SHAPE(768, true, 256, 3, true)    \
  SHAPE(768, false, 256, 3, false)  \
  SHAPE(1024, false, 256, 4, false) \
  SHAPE(2048, false, 512, 4, false)

// Packs of 8 elements. SHAPE(packs up to, few rows only, threads, packs a thread, early)
#define KFC_ROW_SHAPES_8(SHAPE)     \
  SHAPE(8, false, 8, 1, true)       \
  SHAPE(32, true, 32, 1, true)      \
  SHAPE(32, false, 8, 4, false)     \
  SHAPE(64, false, 32, 2, true)     \
  SHAPE(96, true, 32, 3, true)      \
  SHAPE(96, false, 32, 3, false)    \
  SHAPE(128, true, 64, 2, false)    \
  SHAPE(128, false, 32, 4, false)   \
  SHAPE(192, true, 96, 2, true)     \
  SHAPE(192, false, 64, 3, false)   \
  SHAPE(256, true, 128, 2, true)    \
  SHAPE(256, false, 64, 4, false)   \
  SHAPE(384, false, 128, 3, false)  \
  SHAPE(512, false, 128, 4, false)  \
  SHAPE(768, false, 256, 3, false)  \
  SHAPE(1024, false, 256, 4, false) \
  SHAPE(2048, false, 512, 4, false)

// Those that were tried.
#define KFC_ROW_CANDIDATES(SHAPE) \
  SHAPE(8, 1, true)               \
  SHAPE(8, 4, false)              \
  SHAPE(8, 4, true)               \
  SHAPE(32, 1, true)              \
  SHAPE(32, 2, false)             \
  SHAPE(32, 2, true)              \
  SHAPE(32, 3, false)             \
  SHAPE(32, 3, true)              \
  SHAPE(32, 4, false)             \
  SHAPE(32, 4, true)              \
  SHAPE(64, 1, true)              \
  SHAPE(64, 2, false)             \
  SHAPE(64, 2, true)              \
  SHAPE(64, 3, false)             \
  SHAPE(64, 3, true)              \
  SHAPE(64, 4, false)             \
  SHAPE(64, 4, true)              \
  SHAPE(96, 1, true)              \
  SHAPE(96, 2, false)             \
  SHAPE(96, 2, true)              \
  SHAPE(96, 3, false)             \
  SHAPE(96, 3, true)              \
  SHAPE(96, 4, false)             \
  SHAPE(96, 4, true)              \
  SHAPE(128, 1, true)             \
  SHAPE(128, 2, false)            \
  SHAPE(128, 2, true)             \
  SHAPE(128, 3, false)            \
  SHAPE(128, 3, true)             \
  SHAPE(128, 4, false)            \
  SHAPE(128, 4, true)             \
  SHAPE(192, 1, true)             \
  SHAPE(192, 2, false)            \
  SHAPE(192, 2, true)             \
  SHAPE(192, 3, false)            \
  SHAPE(192, 3, true)             \
  SHAPE(192, 4, false)            \
  SHAPE(192, 4, true)             \
  SHAPE(256, 1, true)             \
  SHAPE(256, 2, false)            \
  SHAPE(256, 2, true)             \
  SHAPE(256, 3, false)            \
  SHAPE(256, 3, true)             \
  SHAPE(256, 4, false)            \
  SHAPE(256, 4, true)             \
  SHAPE(384, 1, true)             \
  SHAPE(384, 2, false)            \
  SHAPE(384, 2, true)             \
  SHAPE(384, 3, false)            \
  SHAPE(384, 3, true)             \
  SHAPE(512, 1, true)             \
  SHAPE(512, 2, false)            \
  SHAPE(512, 2, true)             \
  SHAPE(512, 4, false)            \
  SHAPE(512, 4, true)             \
  SHAPE(1024, 1, true)            \
  SHAPE(1024, 2, false)           \
  SHAPE(1024, 2, true)
