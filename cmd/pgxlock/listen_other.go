//go:build !unix

package main

import (
	"context"
	"errors"
	"net"
)

// listenUnix is for systems whose sockets have owners and permissions.
func listenUnix(context.Context, string) (net.Listener, error) {
	return nil, errors.ErrUnsupported
}
