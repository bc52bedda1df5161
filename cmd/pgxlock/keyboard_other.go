//go:build !(linux || darwin || dragonfly || freebsd || netbsd || openbsd)

package main

import (
	"context"
	"io"
)

// On these systems watch takes no keys.

type keyboard struct{}

func openKeyboard(io.Reader) *keyboard                               { return nil }
func (*keyboard) serve(context.Context, func([]byte), func()) func() { return func() {} }
