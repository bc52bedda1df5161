//go:build !linux

package main

import "os"

// fdatasync is fsync where the standard library knows no other.
func fdatasync(f *os.File) error { return f.Sync() }
