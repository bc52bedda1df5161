// Programs that can start a server compile on other systems too, where it cannot be started.

//go:build !(linux || darwin || dragonfly || freebsd || netbsd || openbsd)

package pgserver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"syscall"
)

const (
	sigFreeze = syscall.Signal(0)
	sigThaw   = syscall.Signal(0)
)

func supported() error {
	return fmt.Errorf("a private PostgreSQL on %s: %w", runtime.GOOS, errors.ErrUnsupported)
}

func sysProcAttr(*account, syscall.Signal) *syscall.SysProcAttr { return nil }
func children(int) []int                                        { return nil }
func memory() string                                            { return "" }
func tryLock(*os.File) (bool, error)                            { return false, errors.ErrUnsupported }
func ours(fs.FileInfo) bool                                     { return false }
