//go:build !unix

package main

import (
	"errors"
	"time"
)

func ownTime() (time.Duration, error) { return 0, errors.ErrUnsupported }
