//go:build !linux

package main

import "time"

// canCountServers says whether the time of other processes can be read here.
const canCountServers = false

func familyTime(int) (time.Duration, error) { return 0, nil }
