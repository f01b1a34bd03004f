// Threads that share a row and packs that each of them holds, by the packs of a row. Written by
// scripts/tune_kernels.py on one NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2026-11-22.
#pragma once

// Packs of 4 elements. SHAPE(packs up to, few rows only, threads, packs a thread)
#define KFC_ROW_SHAPES_4(SHAPE) \
  SHAPE(8, false, 8, 1) \
  SHAPE(32, true, 32, 1) \
  SHAPE(32, false, 8, 4) \
  SHAPE(64, false, 32, 2) \
  SHAPE(96, true, 64, 2) \
  SHAPE(96, false, 32, 3) \
  SHAPE(128, false, 64, 2) \
  SHAPE(192, false, 128, 2) \
  SHAPE(256, false, 128, 2) \
  SHAPE(384, false, 192, 2) \
  SHAPE(512, false, 256, 2) \
  SHAPE(768, false, 256, 3) \
  SHAPE(1024, false, 256, 4) \
  SHAPE(2048, false, 512, 4)

// Packs of 8 elements. SHAPE(packs up to, few rows only, threads, packs a thread)
#define KFC_ROW_SHAPES_8(SHAPE) \
  SHAPE(8, false, 8, 1) \
  SHAPE(32, true, 32, 1) \
  SHAPE(32, false, 8, 4) \
  SHAPE(64, true, 64, 1) \
  SHAPE(64, false, 32, 2) \
  SHAPE(96, true, 96, 1) \
  SHAPE(96, false, 32, 3) \
  SHAPE(128, false, 64, 2) \
  SHAPE(192, false, 64, 3) \
  SHAPE(256, false, 128, 2) \
  SHAPE(384, false, 128, 3) \
  SHAPE(512, false, 192, 3) \
  SHAPE(768, false, 256, 3) \
  SHAPE(1024, false, 256, 4) \
  SHAPE(2048, false, 512, 4)

// Those that were tried.
#define KFC_ROW_CANDIDATES(SHAPE) \
  SHAPE(8, 1) \
  SHAPE(8, 4) \
  SHAPE(32, 1) \
  SHAPE(32, 2) \
  SHAPE(32, 3) \
  SHAPE(32, 4) \
  SHAPE(64, 1) \
  SHAPE(64, 2) \
  SHAPE(64, 3) \
  SHAPE(64, 4) \
  SHAPE(96, 1) \
  SHAPE(96, 2) \
  SHAPE(96, 3) \
  SHAPE(96, 4) \
  SHAPE(128, 1) \
  SHAPE(128, 2) \
  SHAPE(128, 3) \
  SHAPE(128, 4) \
  SHAPE(192, 1) \
  SHAPE(192, 2) \
  SHAPE(192, 3) \
  SHAPE(192, 4) \
  SHAPE(256, 1) \
  SHAPE(256, 2) \
  SHAPE(256, 3) \
  SHAPE(256, 4) \
  SHAPE(384, 1) \
  SHAPE(384, 2) \
  SHAPE(384, 3) \
  SHAPE(512, 1) \
  SHAPE(512, 2) \
  SHAPE(512, 4) \
  SHAPE(1024, 1) \
  SHAPE(1024, 2)
